"""Softcapped cross-entropy in chunks of tokens, so that the full (tokens x vocabulary) logits never exist.

At 65,536 tokens a micro-step and a vocabulary of 32,768 the fp32 logits alone are 8.6 GB, more than everything else
in the layer. Here a chunk's logits live only until its gradient is known: the forward computes the gradient of the
hidden states and of the head at once, and the backward scales it. The head is so multiplied three times (logits, both
gradients), as in any linear layer, and not a fourth time to recompute.
"""

import torch
from torch import Tensor

SOFTCAP = 15.0
IGNORE = -1
# Logits held at once. A CPU chunk should stay in its cache (4 MB); an accelerator wants few, large matrices (0.5 GB).
CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 20, 1 << 27


def softcap(logits: Tensor) -> Tensor:
    """15 * tanh(z / 15): logits that can't run away.

    Source: Gemma 2, 2024, arXiv 2408.00118. Taught in chapter 00_model.

    >>> softcap(torch.tensor([0.0, 1000.0]))
    tensor([ 0., 15.])
    """
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def _chunks(x: Tensor, weight: Tensor):
    """Row ranges of x whose logits have at most the allowed number of elements."""
    allowed = CPU_CHUNK if x.device.type == "cpu" else ACCELERATOR_CHUNK
    rows = max(1, allowed // weight.size(0))
    return ((start, min(start + rows, x.size(0))) for start in range(0, x.size(0), rows))


def _exponentials(x: Tensor, weight: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(z/15), exp(15 tanh(z/15)) and its row sums of one chunk: (n, V), (n, V), (n, 1).

    The cap bounds every logit by 15 in size, so that exp needs no maximum taken off first: one pass saved.
    """
    # The division by the cap rides along in the product: beta=0 means that the first argument is never read.
    z = torch.addmm(x.new_empty(1), x, weight.t(), beta=0, alpha=1 / SOFTCAP)  # (n, V)
    squashed = z.to(torch.promote_types(z.dtype, torch.float32)).tanh_()
    exponentials = torch.mul(squashed, SOFTCAP).exp_()
    exponentials[:, vocab_size:] = 0.0  # rows that only pad the table are no tokens
    return squashed, exponentials, exponentials.sum(-1, keepdim=True)


def _nats(squashed: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
    chosen = squashed.gather(1, targets.clamp_min(0).unsqueeze(1)) * SOFTCAP  # (n, 1)
    return (sums.log() - chosen).squeeze(1).masked_fill(targets == IGNORE, 0.0)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        cast = weight.to(x.dtype)  # (V, C): one copy in the compute dtype for all chunks
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for start, stop in _chunks(x, weight):
            part, target = x[start:stop], targets[start:stop]
            squashed, probability, sums = _exponentials(part, cast, vocab_size)
            total += _nats(squashed, sums, target).sum()
            ignored = (target == IGNORE).unsqueeze(1)  # (n, 1)
            probability.div_(sums.masked_fill(ignored, torch.inf))  # rows of zeros: no pass of their own
            probability.scatter_add_(1, target.clamp_min(0).unsqueeze(1), ignored.to(sums.dtype) - 1)
            probability.sub_(squashed.square_().mul_(probability))  # times 1 - tanh^2, the derivative of the cap
            grad_logits = probability.to(x.dtype)  # (n, V)
            torch.mm(grad_logits, cast, out=grad_x[start:stop])
            _accumulate(grad_weight, grad_logits, part)
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        # A scalar tensor takes part without changing the dtype: 1/batch is never rounded to 16 bits.
        return grad_x * grad, grad_weight * grad, None, None


# torch.compile would unroll the loop into a copy of its body for each chunk: it stays eager, the model before it is one
# graph.
_eager_loss = torch.compiler.disable(_ChunkedLoss.apply)


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, x: Tensor) -> None:
    if grad_weight.dtype == x.dtype:
        grad_weight.addmm_(grad_logits.t(), x)
    else:
        grad_weight += grad_logits.t() @ x  # the product is in bf16, the sum over chunks in fp32


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Summed nats of the targets that are not -1, with gradients for x and weight.

    Shapes: x (N, C) in the compute dtype, weight (padded V, C) fp32, targets (N,) -> scalar, fp32 or wider.
    Source: the cut-cross-entropy idea, Wijmans et al., 2024, arXiv 2411.09009. Taught in chapter 00_model.

    >>> x, w = torch.zeros(2, 3), torch.zeros(64, 3)
    >>> round(float(chunked_loss(x, w, torch.tensor([5, -1]), vocab_size=60)), 4)  # ln 60
    4.0943
    """
    return _eager_loss(x, weight, targets, vocab_size)


@torch.no_grad()
def chunked_nats(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Nats of each target, 0 where it is -1: x (N, C), weight (padded V, C), targets (N,) -> (N,) fp32.

    >>> chunked_nats(torch.zeros(2, 3), torch.zeros(64, 3), torch.tensor([5, -1]), 64)
    tensor([4.1589, 0.0000])
    """
    cast = weight.to(x.dtype)
    parts = []
    for start, stop in _chunks(x, weight):
        squashed, _, sums = _exponentials(x[start:stop], cast, vocab_size)
        parts.append(_nats(squashed, sums, targets[start:stop]))
    return torch.cat(parts)
