"""Kernels for windows and documents that somebody else wrote, each in this package's shapes: flex, flash2, flash3.

Nothing heavy is imported before it is used. flash is always called in its form for packed rows (varlen), where a batch
is one long row with marks between its parts: full rows and documents are then the same call. Which of these a machine
can run is for `nanolearn.model.backends` to find out.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nanolearn.errors import UserError

HUB = "kernels-community/flash-attn3"
# Where each kernel may come from, best first: a module, and how it is printed.
SOURCES = {
    "flash3": {"flash_attn_interface": "flash_attn_interface", "kernels": f"{HUB} from the kernels hub"},
    "flash2": {"flash_attn": "flash_attn", "torch.nn.attention.varlen": "torch's own copy, torch.nn.attention.varlen"},
    "flex": {"triton": "torch.nn.attention.flex_attention, through Triton"},
}
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int], Tensor]


def source(name: str) -> str:
    """The module that a kernel would come from; "" where there is none. Imports nothing of it.

    >>> source("flash3") in ("", *SOURCES["flash3"])
    True
    """
    return next((module for module in SOURCES[name] if _there(module)), "")


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is missing, or a module that has no spec
        return False


def flash(name: str, q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None = None) -> Tensor:
    """FlashAttention: q (B, T_q, H, D), k and v (B, T_k, KV, D) -> (B, T_q, H, D), of 16-bit numbers on a GPU.

    With documents T_q is T_k: raises UserError otherwise. A document's number must not come again later in its row.
    Source: Dao, 2023, arXiv 2307.08691; Shah et al., 2024, arXiv 2407.08608. Taught in chapter 05_attention.
    """
    (B, T), S = q.shape[:2], k.size(1)
    if documents is None:
        ends_q, ends_k = even(B, T, q.device), even(B, S, q.device)
    elif T == S:
        ends_q = ends_k = boundaries(documents)
    else:
        raise UserError(f"documents, and {T} queries for {S} keys", f"{name} takes documents in whole rows only")
    back = -1 if window >= S - 1 else window
    rows_q, rows_k, rows_v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (B*T, H, D)
    return loaded(name)(rows_q, rows_k, rows_v, ends_q, ends_k, T, S, back).view(q.shape)


@lru_cache(maxsize=8)
def loaded(name: str) -> Varlen:
    """Import a flash kernel as `f(q, k, v, ends_q, ends_k, max_q, max_k, back)`. Raises what the import raises."""
    module = source(name)
    if module == "torch.nn.attention.varlen":
        from torch.nn.attention.varlen import varlen_attn

        def own(q, k, v, ends_q, ends_k, max_q, max_k, back):
            grouped = q.size(1) != k.size(1)
            marks = (ends_q, ends_k, max_q, max_k)
            return varlen_attn(q, k, v, *marks, window_size=(back, 0), enable_gqa=grouped)

        return own
    if module == "kernels":
        get_kernel = import_module("kernels").get_kernel

        function = get_kernel(HUB, version=1).flash_attn_varlen_func
    else:
        function = import_module(module).flash_attn_varlen_func

    def package(q, k, v, ends_q, ends_k, max_q, max_k, back):
        marks = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        y = function(q, k, v, **marks, causal=True, window_size=(back, 0))
        return y[0] if isinstance(y, tuple) else y  # FlashAttention 3 returned its row sums too, at first

    return package


def boundaries(documents: Tensor) -> Tensor:
    """Where documents begin in the batch laid out as one row, and its end: (B, T) -> (documents + 1,) int32.

    >>> boundaries(torch.tensor([[1, 1, 2], [1, 1, 1]])).tolist()
    [0, 2, 3, 6]

    Taught in chapter 05_attention.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()  # the host waits here: how many there are is in the data
    return torch.cat([starts, starts.new_tensor([documents.numel()])]).int()


def _even(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)


_kept_even = lru_cache(maxsize=32)(_even)


def even(rows: int, length: int, device: torch.device) -> Tensor:
    """`boundaries` of rows that are one document each, made once for each shape.

    >>> even(2, 3, torch.device("cpu")).tolist()
    [0, 3, 6]
    """
    return _even(rows, length, device) if torch.compiler.is_compiling() else _kept_even(rows, length, device)


def flex(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None = None) -> Tensor:
    """torch's FlexAttention under a block mask: blocks of 128 x 128 that nobody sees are never computed.

    Shapes as in `flash`. The mask is kept by shape; with documents it is made anew, since it is in the data. On a GPU
    the kernel is compiled at its first call; uncompiled it forms all T x T scores. Source: Dong et al., 2024, arXiv
    2412.05496. Taught in chapter 05_attention.

    >>> v = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    >>> flex(torch.zeros_like(v), torch.zeros_like(v), v, window=1).flatten()
    tensor([1.0000, 1.5000, 4.0000])
    """
    shape = (q.size(1), k.size(1), window, q.device)
    mask = kept_block_mask(*shape) if documents is None else block_mask(*shape, documents)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    y = _flex_kernel(q.device.type)(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
    return y.transpose(1, 2)


def _flex_kernel(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Inside a model that is compiled, it is compiled with it.
    plainly: Callable[..., Any] = flex_attention
    return plainly if device == "cpu" or torch.compiler.is_compiling() else _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(queries: int, keys: int, window: int, device: torch.device, documents: Tensor | None = None):
    """FlexAttention's mask: the rule of `windows.window_mask` and `windows.same_document`, and which blocks it touches.

    >>> block_mask(256, 256, 16, torch.device("cpu")).to_dense()[0, 0].tolist()
    [[1, 0], [1, 1]]

    Taught in chapter 05_attention.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    before = keys - queries

    def seen(b, h, i, j):
        near = (j <= i + before) & (j >= i + before - window)
        return near if documents is None else near & (documents[b, i + before] == documents[b, j])

    rows = None if documents is None else documents.size(0)
    return create_block_mask(seen, rows, None, queries, keys, device=str(device))


_kept_block_mask = lru_cache(maxsize=32)(block_mask)


def kept_block_mask(*key):
    """`block_mask` without documents, made once for each shape."""
    return block_mask(*key) if torch.compiler.is_compiling() else _kept_block_mask(*key)
