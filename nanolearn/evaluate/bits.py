"""Bits per byte: how many bits the model needs for a byte of text it has not seen.

Nats per token can't be compared between tokenizers (longer tokens carry more text); bits per byte can. Nats
and bytes are summed in float64 and over all ranks, and only then divided, so that the value does not depend
on how rows are divided into batches or ranks. It takes a model and batches, never a run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanolearn import distributed
from nanolearn.errors import UserError

IGNORE = -1


class Scorer(Protocol):
    """What a model must offer to be measured: the nats of each target, (B, T), (B, T) -> (B, T).

    Taught in chapter 10_evaluation.
    """

    def token_nats(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


class Rows(Protocol):
    """Inputs and targets (B, T); a target of -1 is not scored. Taught in chapter 10_evaluation."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...


@dataclass(frozen=True)
class Bits:
    """The sums over all ranks, and what they give; `tokens` counts the targets that have bytes.

    >>> round(Bits(nats=math.log(256.0), bytes=1, tokens=1).bpb, 12)
    8.0
    """

    nats: float
    bytes: int
    tokens: int

    @property
    def bpb(self) -> float:
        return self.nats / (math.log(2.0) * self.bytes)

    @property
    def loss(self) -> float:
        """Nats per token, over the same targets."""
        return self.nats / self.tokens


@torch.no_grad()
def bits_per_byte(model: Scorer, batches: Iterable[Rows], token_bytes: np.ndarray) -> Bits:
    """Score every target that has bytes: sum of nats / (ln 2 * sum of bytes), summed over the ranks.

    token_bytes (vocab_size,): raw bytes of each token, 0 for special tokens, which so count in neither sum,
    as ignored targets (-1) do. Batches lie on the model's device; a rank may have none, as long as some rank
    has one. Raises UserError if nothing at all was scored, instead of dividing by zero.

    Source: Gao et al., The Pile, 2020, arXiv 2101.00027, section 3.1.
    Taught in chapter 10_evaluation.

    >>> class Uniform:
    ...     def token_nats(self, tokens, targets):
    ...         return torch.full(targets.shape, math.log(4.0))
    >>> class Row:
    ...     inputs = torch.tensor([[0, 1]])
    ...     targets = torch.tensor([[1, -1]])
    >>> round(bits_per_byte(Uniform(), [Row()], np.array([0, 2])).bpb, 6)  # 2 bits for 2 bytes
    1.0
    """
    sums: Tensor | None = None
    table = torch.as_tensor(token_bytes, dtype=torch.int64)
    for batch in batches:
        table = table.to(batch.targets.device)
        part = _sums(model, batch, table)
        sums = part if sums is None else sums + part
    nats, byte_count, tokens = distributed.all_reduce_sum([0, 0, 0] if sums is None else sums.tolist())
    if not byte_count:
        raise UserError(
            "not one validation token was scored", "give more val_tokens (at least one batch), or 0 to switch it off"
        )
    return Bits(nats, int(byte_count), int(tokens))


def _sums(model: Scorer, batch: Rows, token_bytes: Tensor) -> Tensor:
    """Nats, bytes and tokens of one batch: (3,) float64, left on the device so that batches queue up behind it."""
    targets = batch.targets
    sizes = token_bytes[targets.clamp_min(0)] * (targets != IGNORE)  # (B, T)
    nats = model.token_nats(batch.inputs, targets)
    if nats.device.type == "mps":  # Apple's devices have no float64
        nats, sizes = nats.cpu(), sizes.cpu()
    scored = sizes > 0
    return torch.stack([nats.double().masked_fill(~scored, 0.0).sum(), sizes.sum().double(), scored.sum().double()])
