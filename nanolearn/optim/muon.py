"""Muon: momentum for matrices, with the update orthogonalised before it is taken.

A gradient matrix has a few large singular values and many small ones; a step along it moves a few directions and
leaves the rest. Muon replaces it by the nearest matrix whose singular values are all about one. All functions here
work on stacks of same-shaped matrices (n, rows, cols), because one batched product keeps a device busy where n small
ones would not. Rows are outputs, as in torch's linear layers. Taught in chapter 08_muon.
"""

import torch
from torch import Tensor

# Amsel et al., 2025, arXiv 2505.16932 (safety 2e-2, cushion 2): the best odd quintic for each of five steps in turn.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NORM_FLOOR = 1e-6  # at step 0 the gradients of q, k, v and the first MLP matrix are exactly zero
MOMENT_FLOOR = 1e-10


def _frobenius(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x, keepdim=True).clamp_min_(NORM_FLOOR)  # (n, 1, 1)


def equilibrate(x: Tensor) -> Tensor:
    """Scale every row to the mean row norm: (n, rows, cols) -> same.

    >>> equilibrate(torch.tensor([[[5.0, 0.0], [0.0, 1.0]]]))
    tensor([[[3., 0.],
             [0., 3.]]])
    """
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (n, rows, 1)
    return x * (norms.mean(dim=-2, keepdim=True) / norms.clamp_min(NORM_FLOOR))


def orthogonalise(x: Tensor, coefficients: tuple = POLAR_EXPRESS) -> Tensor:
    """Push all singular values towards 1 by quintics in X X^T: (n, rows, cols) -> same, in x's dtype.

    Needs only matrix products, on the smaller Gram side. A zero matrix stays zero.
    Source: Amsel et al., 2025, arXiv 2505.16932. Taught in chapter 08_muon.

    >>> s = torch.linalg.svdvals(orthogonalise(torch.randn(1, 64, 16, generator=torch.manual_seed(0))))
    >>> bool(s.min() > 0.8 and s.max() < 1.2)
    True
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (1.01 * _frobenius(x))
    for a, b, c in coefficients:
        gram = x @ x.mT  # (n, s, s), s the smaller side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def balance(update: Tensor, second_moment: Tensor, beta: float = 0.9) -> Tensor:
    """NorMuon: divide each row (of wide matrices each column) by its running size, keep the whole norm.

    Shapes: update (n, rows, cols), second_moment (n, rows, 1) or (n, 1, cols), changed in place.
    Source: Li et al., 2025, arXiv 2510.05491. Taught in chapter 08_muon.

    >>> moment = torch.zeros(1, 2, 1)
    >>> balance(torch.tensor([[[3.0], [1.0]]]), moment).flatten()
    tensor([2.2361, 2.2361])
    """
    dim = -1 if second_moment.size(-1) == 1 else -2
    second_moment.lerp_(update.square().mean(dim=dim, keepdim=True), 1 - beta)
    balanced = update * second_moment.clamp_min(MOMENT_FLOOR).rsqrt()
    return balanced * (torch.linalg.matrix_norm(update, keepdim=True) / _frobenius(balanced))


def moment_shape(shape: torch.Size) -> tuple[int, int, int]:
    """Shape of the second moment for a stack (n, rows, cols): a number a row when tall or square, else a column.

    >>> moment_shape(torch.Size([3, 8, 2])), moment_shape(torch.Size([3, 2, 8]))
    ((3, 8, 1), (3, 1, 8))
    """
    n, rows, cols = shape
    return (n, rows, 1) if rows >= cols else (n, 1, cols)


def muon_update(gradient: Tensor, buffer: Tensor, second_moment: Tensor, momentum: float) -> Tensor:
    """The direction of one Muon step; the new weights are weights - rate * this.

    Shapes: gradient, buffer (n, rows, cols) fp32, second_moment as `moment_shape`; both states change in place.
    Nesterov momentum -> equal rows -> orthogonal -> Frobenius norm sqrt(min(rows, cols)) -> NorMuon. The products
    run in bf16 on accelerators that have it, in fp32 elsewhere. Taught in chapter 08_muon.

    >>> g = torch.ones(1, 4, 2)
    >>> u = muon_update(g, torch.zeros_like(g), torch.zeros(moment_shape(g.shape)), momentum=0.95)
    >>> round(float(u.norm()), 4)  # sqrt(2)
    1.4142
    """
    buffer.lerp_(gradient, 1 - momentum)
    update = equilibrate(torch.lerp(gradient, buffer, momentum))
    update = orthogonalise(update.to(product_dtype(update))).to(gradient.dtype)
    update *= min(update.shape[-2:]) ** 0.5 / _frobenius(update)
    return balance(update, second_moment)


def product_dtype(x: Tensor) -> torch.dtype:
    """bf16 where the hardware multiplies it faster than fp32; five quintic steps forgive its rounding."""
    has_bf16 = x.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 and x.dtype == torch.float32 else x.dtype
