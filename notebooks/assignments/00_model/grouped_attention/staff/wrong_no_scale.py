"""Wrong: scores are not divided by the root of the head size."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, owner: Sequence[int], real: Sequence[int]) -> Tensor:
    T, D, dtype = q.size(1), q.size(3), q.dtype
    wide = torch.promote_types(q.dtype, torch.float32)
    which = torch.tensor(owner, device=q.device)
    q, k, v = q.to(wide), k[:, :, which].to(wide), v[:, :, which].to(wide)  # (B, T, H, D)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)  # (B, H, T, T)
    place = torch.arange(T, device=q.device)
    there = place < torch.tensor(real, device=q.device)[:, None]  # (B, T)
    causal = place[None, :] <= place[:, None]  # (T, T): query, key
    # A query that is not real looks at itself, so that its softmax is a number; what it finds is thrown away.
    seen = (causal & there[:, None, :]) | torch.eye(T, dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return torch.where(there[:, :, None, None], y, 0.0).to(dtype)
