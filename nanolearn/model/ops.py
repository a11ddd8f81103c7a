"""Small pieces of the model whose backward is written by hand, because that halves their memory traffic.

Each is one line of mathematics. Written with torch's own operators, autograd keeps every intermediate tensor and walks
over each again; on a CPU, where memory is the narrow place, these few lines then cost more than the matrices.
Every backward here is compared with autograd in float64 by a test. Chapter 06_mfu counts what they save.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6  # said explicitly: torch's default is the dtype's epsilon, .0078 in bf16, which bends small vectors


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))
        inverse = mean_square.add_(NORM_EPS).rsqrt_().mul_(scale)  # (..., 1)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        mean = (grad * y).mean(-1, keepdim=True).div_(ctx.scale**2)  # (..., 1)
        return torch.addcmul(grad, y, mean, value=-1).mul_(inverse), None


def norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """RMSNorm over the last axis without weights, times a constant: (..., C) -> (..., C).

    Computed in fp32 whatever the dtype of x. Accelerators have one fused kernel for it; a CPU composes it of six, so
    there the backward is ours and takes less than half the time.
    Source: Zhang & Sennrich, 2019, arXiv 1910.07467. Taught in chapter 00_model.

    >>> norm(torch.tensor([3.0, 4.0]), 2.0)
    tensor([1.6971, 2.2627])
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _Norm.apply(x, scale)
    y = F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)
    return y if scale == 1.0 else y * scale


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = x.clamp_min(0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors  # 0 where x was negative, so no second mask is needed
        return torch.mul(grad, positive).mul_(2)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0) squared, keeping one tensor for the backward instead of two.

    Source: So et al., 2021, arXiv 2109.08668. Taught in chapter 00_model.

    >>> relu_squared(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return _ReluSquared.apply(x)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotated(x, table, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors  # a rotation's transpose is the rotation back: x itself is not needed
        return _rotated(grad, table, -1), None


def _rotated(x: Tensor, table: Tensor, sign: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    cos, sin = table[..., 0].unsqueeze(1), table[..., 1].unsqueeze(1)  # (T, 1, D/2)
    left = torch.addcmul(a * cos, b, sin, value=-sign)
    right = torch.addcmul(b * cos, a, sin, value=sign)
    return torch.cat([left, right], dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions, half-split: (B, T, H, D), table (T, D/2, 2) of cosines and sines -> (B, T, H, D).

    Source: Su et al., 2021, arXiv 2104.09864. Taught in chapter 05_attention.

    >>> quarter = torch.tensor([[[0.0, 1.0]]])  # 90 degrees at position 0
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), quarter)
    tensor([[[[0., 1.]]]])
    """
    return _Rotate.apply(x, table)


def rotary_table(sequence_len: int, head_dim: int, base: float, device: torch.device | str) -> Tensor:
    """Cosines and sines of every position and pair, fp32: (T, D/2, 2).

    >>> rotary_table(2, 2, 1e5, "cpu")[1, 0]
    tensor([0.5403, 0.8415])
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    angles = torch.outer(torch.arange(sequence_len, dtype=torch.float64, device="cpu"), base**-pairs)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float().to(device)


def mix(x: Tensor, first: Tensor, keep: Tensor, add: Tensor) -> Tensor:
    """keep * x + add * first, with two learned scalars: (B, T, C) twice -> (B, T, C).

    >>> mix(torch.ones(1), torch.ones(1), torch.tensor(0.5), torch.tensor(0.25))
    tensor([0.7500])
    """
    return torch.addcmul(x * keep.to(x.dtype), first, add.to(x.dtype))
