"""Causal attention with an optional window and optional document boundaries, by whichever kernel was chosen.

`attend` is the only entry: one meaning, five backends. Two run everywhere: "blocked", whose memory grows with
T x window, and "sdpa", one call of torch's kernel a layer, where a window is a mask over the whole square. Three need a
GPU (`nanolearn.model.kernels`). `nanolearn.model.backends` finds out which of them a machine can run, and picks.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanolearn.model.kernels import flash, flex
from nanolearn.model.windows import blocked, whole

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "sdpa": whole,
    "blocked": blocked,
    "flex": flex,
    "flash2": partial(flash, "flash2"),
    "flash3": partial(flash, "flash3"),
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, backend: str = "blocked", documents: Tensor | None = None
) -> Tensor:
    """Softmax attention in which query i sees keys max(0, i - window) .. i, of its own document.

    Shapes: q (B, T_q, H, D), k and v (B, T_k, KV, D) -> (B, T_q, H, D). H is a multiple of KV (grouped queries). Where
    T_q < T_k, the queries are the last ones: the keys before them come from a cache. `documents` (B, T_k) numbers the
    document of each position (`windows.document_ids`); None is one document a row. The scale is 1/sqrt(D). Source:
    Vaswani et al., 2017, arXiv 1706.03762; windows: Beltagy et al., 2020, arXiv 2004.05150. Taught in chapter
    05_attention.

    >>> import torch
    >>> v = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    >>> attend(torch.zeros_like(v), torch.zeros_like(v), v, window=1).flatten()
    tensor([1.0000, 1.5000, 4.0000])
    >>> attend(torch.zeros_like(v), torch.zeros_like(v), v, window=1, documents=torch.tensor([[1, 1, 2]])).flatten()
    tensor([1.0000, 1.5000, 6.0000])
    """
    return BACKENDS[backend](q, k, v, window, documents)
