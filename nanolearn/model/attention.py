"""Causal attention with an optional window, in memory that grows with T x window and never with T x T.

`attend` is the only entry. Full causal attention goes to torch's fused kernel. A window is cut into blocks as long
as the window: a query then needs its own block of keys and the one before it, nothing else, so a mask of
(window, 2 x window) serves every block. That works on any device; chapter 05_attention adds faster kernels to it.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

CAUSAL, MASKED, BLOCKED = "causal", "masked whole", "in blocks as long as the window"


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Softmax attention in which query i sees keys max(0, i - window) .. i.

    Shapes: q (B, T, H, D), k and v (B, T, KV, D) -> (B, T, H, D). H is a multiple of KV (grouped-query attention).
    The scale is 1/sqrt(D). Source: Vaswani et al., 2017, arXiv 1706.03762; windows: Beltagy et al., 2020,
    arXiv 2004.05150. Taught in chapter 05_attention.

    >>> v = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    >>> attend(torch.zeros_like(v), torch.zeros_like(v), v, window=1).flatten()
    tensor([1.0000, 1.5000, 4.0000])
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    T = q.size(2)
    grouped = q.size(1) != k.size(1)
    way = _way(T, window)
    if way == CAUSAL:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif way == MASKED:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=_mask(T, T, window, 0, q.device), enable_gqa=grouped)
    else:
        y = _blocked(q, k, v, window, grouped)
    return y.transpose(1, 2)


def _way(T: int, window: int) -> str:
    if window >= T - 1:
        return CAUSAL
    # Two blocks with the block before them are as large as the whole square: one masked call is the same work.
    return MASKED if T <= 2 * window else BLOCKED


def describe(sequence_len: int, windows: Sequence[int], device_type: str) -> str:
    """What `attend` does in a model whose layers have these windows, in one line.

    >>> describe(256, (128, 128, 128, 256), "cpu")
    "torch's scaled_dot_product_attention: 3 layers masked whole (window 128 of 256), 1 layer causal"

    Taught in chapter 05_attention.
    """
    parts = []
    for window, layers in sorted(Counter(windows).items()):
        way = _way(sequence_len, window)
        span = "" if way == CAUSAL else f" (window {window} of {sequence_len})"
        parts.append(f"{layers} {'layer' if layers == 1 else 'layers'} {way}{span}")
    masks = any(_way(sequence_len, window) != CAUSAL for window in windows)
    # FlashAttention in torch takes no mask; the kernel that it then chooses does.
    slower = "; a mask rules out its flash kernel" if masks and device_type == "cuda" else ""
    return f"torch's scaled_dot_product_attention: {', '.join(parts)}{slower}"


def _blocked(q: Tensor, k: Tensor, v: Tensor, window: int, grouped: bool) -> Tensor:
    B, H, T, D = q.shape
    blocks = -(-T // window)
    pad = blocks * window - T
    q = F.pad(q, (0, 0, 0, pad)).view(B, H, blocks, window, D)
    # One empty block in front gives the first block a "before" as well; the mask hides it.
    k, v = (_with_block_before(t, window, blocks, pad) for t in (k, v))  # (B, KV, N, 2W, D)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B*N, H, W, D)
    other = _mask(window, 2 * window, window, window, q.device)
    first = other.clone()
    first[:, :window] = False
    mask = torch.stack([first] + [other] * (blocks - 1)).repeat(B, 1, 1).unsqueeze(1)  # (B*N, 1, W, 2W)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return y.view(B, blocks, H, window, D).transpose(1, 2).reshape(B, H, blocks * window, D)[:, :, :T]


def _with_block_before(t: Tensor, window: int, blocks: int, pad: int) -> Tensor:
    B, H, _, D = t.shape
    t = F.pad(t, (0, 0, window, pad)).view(B, H, blocks + 1, window, D)
    return torch.cat([t[:, :, :-1], t[:, :, 1:]], dim=3)  # (B, KV, N, 2W, D)


def window_mask(queries: int, keys: int, window: int, offset: int, device: torch.device) -> Tensor:
    """True where a query may look: (queries, keys). Query i stands at key position i + offset.

    >>> window_mask(3, 3, 1, 0, torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    i = torch.arange(queries, device=device).unsqueeze(1) + offset
    j = torch.arange(keys, device=device).unsqueeze(0)
    return (j <= i) & (j >= i - window)


_kept_mask = lru_cache(maxsize=32)(window_mask)


def _mask(*key) -> Tensor:
    # torch.compile looks through a cache, and warns of it at every call.
    return window_mask(*key) if torch.compiler.is_compiling() else _kept_mask(*key)
