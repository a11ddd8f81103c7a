"""Windows and documents on any device: the masks, and attention cut into blocks so that memory grows with T x window.

A query of block n sees keys of its own block and of the one before it, where blocks are as long as the window: so one
mask of (window, 2 x window) serves every block, every row and every layer. Keys and values are laid side by side with
the block before them, which copies each once more. The first block has none before it, and goes through torch's causal
kernel. Chapter 05_attention takes this apart.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

CAUSAL, MASKED, BLOCKED = "causal", "masked whole", "in blocks as long as the window"


def way(queries: int, keys: int, window: int, documents: bool = False) -> str:
    """Which of the three ways `blocked` goes for a shape.

    >>> way(256, 256, 255), way(256, 256, 128), way(1, 256, 256), way(512, 512, 128) == BLOCKED
    ('causal', 'masked whole', 'causal', True)
    """
    if window >= keys - 1:
        # One query at the end sees everything, which is no mask either.
        return CAUSAL if queries in (1, keys) and not documents else MASKED
    # Two blocks with the block before them are as large as the whole square: one masked call is the same work.
    return MASKED if queries <= 2 * max(window, 1) else BLOCKED


def blocked(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None = None) -> Tensor:
    """Attention in memory that grows with T x window: q (B, T_q, H, D), k and v (B, T_k, KV, D) -> (B, T_q, H, D).

    The queries are the last T_q of T_k positions. `documents` (B, T_k) numbers the document of each position. Source:
    blocks with the one before: Beltagy et al., 2020, arXiv 2004.05150. Taught in chapter 05_attention.

    >>> v = torch.arange(1.0, 7.0).view(1, 6, 1, 1)
    >>> blocked(torch.zeros_like(v), torch.zeros_like(v), v, window=1).flatten()
    tensor([1.0000, 1.5000, 2.5000, 3.5000, 4.5000, 5.5000])
    """
    T, W = q.size(1), max(window, 1)
    before = min(k.size(1) - T, window)  # keys in front of the first query that it may see
    if T + before < k.size(1):
        k, v = k[:, -(T + before) :], v[:, -(T + before) :]
        documents = None if documents is None else documents[:, -(T + before) :]
    if way(T, T + before, window, documents is not None) != BLOCKED:
        return whole(q, k, v, window, documents)
    start, rest = q.split([W, T - W], dim=1)  # a split's backward is one copy, two slices' are two sums
    theirs = None if documents is None else documents[:, : before + W]
    # Copies: the backward keeps what it is given, and a view would keep all keys beside their copies in blocks.
    first = whole(start.contiguous(), k[:, : before + W].clone(), v[:, : before + W].clone(), window, theirs)
    return torch.cat([first, _blocks(rest, k[:, before:], v[:, before:], window, documents, before)], dim=1)


def whole(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None = None) -> Tensor:
    """The same in one call of torch's kernel; a window or documents are a mask, (T_q, T_k) or (B, 1, T_q, T_k).

    >>> q = torch.zeros(1, 2, 1, 1)
    >>> whole(q, q, torch.tensor([1.0, 3.0]).view(1, 2, 1, 1), window=1, documents=torch.tensor([[0, 1]])).flatten()
    tensor([1., 3.])

    Taught in chapter 05_attention.
    """
    T, before = q.size(1), k.size(1) - q.size(1)
    if way(T, k.size(1), window, documents is not None) == CAUSAL:
        return _sdpa(q, k, v, causal=T == k.size(1))
    mask = kept_mask(T, k.size(1), window, before, q.device)
    if documents is not None:
        mask = mask & same_document(documents[:, -T:], documents).unsqueeze(1)  # (B, 1, T_q, T_k)
    return _sdpa(q, k, v, mask=mask)


def _blocks(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None, before: int) -> Tensor:
    """All blocks but the first: q (B, T - W, H, D) with the keys (B, T, KV, D) of all blocks."""
    B, T, W = q.size(0), q.size(1), max(window, 1)
    pad = -T % W
    if pad:
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
    mask = kept_mask(W, 2 * W, window, W, q.device)  # (W, 2W): every block's
    if documents is not None:
        d = F.pad(documents[:, before:], (0, pad), value=-1).view(B, -1, W)  # (B, N+1, W)
        mask = mask & same_document(d[:, 1:], _beside(d)).flatten(0, 1).unsqueeze(1)  # (B*N, 1, W, 2W)
    q = q.reshape(-1, W, *q.shape[2:])  # (B*N, W, H, D)
    k, v = (_beside(t.view(B, -1, W, *t.shape[2:])).flatten(0, 1) for t in (k, v))  # (B*N, 2W, KV, D)
    y = _sdpa(q, k, v, mask=mask)
    return y.reshape(B, T + pad, *y.shape[2:])[:, :T]


def _beside(t: Tensor) -> Tensor:
    """Each block but the first with the one before it: (B, N+1, W, ...) -> (B, N, 2W, ...)."""
    return torch.cat([t[:, :-1], t[:, 1:]], dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    grouped = q.size(1) != k.size(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return y.transpose(1, 2)


def window_mask(queries: int, keys: int, window: int, before: int, device: torch.device) -> Tensor:
    """True where a query may look: (queries, keys). Query i stands at key position i + before.

    >>> window_mask(3, 3, 1, 0, torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Taught in chapter 05_attention.
    """
    i = torch.arange(queries, device=device).unsqueeze(1) + before
    j = torch.arange(keys, device=device).unsqueeze(0)
    return (j <= i) & (j >= i - window)


_kept = lru_cache(maxsize=32)(window_mask)


def kept_mask(*key) -> Tensor:
    """`window_mask`, made once for each shape.

    >>> kept_mask(2, 2, 1, 0, torch.device("cpu")) is kept_mask(2, 2, 1, 0, torch.device("cpu"))
    True
    """
    # torch.compile looks through a cache, and warns of it at every call.
    return window_mask(*key) if torch.compiler.is_compiling() else _kept(*key)


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """True where query and key lie in one document: numbers (..., T_q) and (..., T_k) -> (..., T_q, T_k).

    >>> same_document(torch.tensor([0, 1]), torch.tensor([0, 1])).int().tolist()
    [[1, 0], [0, 1]]
    """
    return queries.unsqueeze(-1) == keys.unsqueeze(-2)


def document_ids(tokens: Tensor, bos: int) -> Tensor:
    """Number the documents of packed rows: (B, T) tokens -> (B, T); each BOS begins one.

    >>> document_ids(torch.tensor([[9, 4, 5, 9, 6]]), bos=9).tolist()
    [[1, 1, 1, 2, 2]]

    Taught in chapter 05_attention.
    """
    return (tokens == bos).cumsum(1)
