"""Who owns what: each weight, its gradient's sum and its optimizer state belong to one rank, or to all (ZeRO-1).

Optimizer state is twice the weights, and every rank needs it only to compute the same update as all others. So each
rank keeps the state of its share, updates that share, and sends the new weights around (Rajbhandari et al., 2019,
arXiv 1910.02054, stage 1). Muon needs a matrix as a whole, so matrices are dealt out whole; AdamW works on each
number alone, so big tables are cut by rows; a handful of scalars is not worth a message and belongs to everybody.
Every rank computes the same answer, so nothing has to be agreed upon. Taught in chapter 14_scaling_out.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a parameter, and the rank that owns them.

    >>> import torch
    >>> Piece("head.weight", owner=1, start=2, stop=4).of(torch.arange(6).view(6, 1)).flatten()
    tensor([2, 3])
    """

    name: str
    owner: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor (rows, ...): a view, contiguous as rows are."""
        return tensor[self.start : self.stop]


def by_rows(name: str, rows: int, ranks: int) -> list[Piece]:
    """A table cut into one piece a rank, ceil(rows / ranks) each; the last pieces may be short, or empty and left out.

    The same cut as DTensor's Shard(0), which is how checkpoints name the pieces.

    >>> [(piece.owner, piece.start, piece.stop) for piece in by_rows("head", rows=5, ranks=4)]
    [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    """
    each = -(-rows // ranks)
    return [Piece(name, rank, rank * each, min((rank + 1) * each, rows)) for rank in range(ranks) if rank * each < rows]


def deal(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Whole matrices to ranks: the costliest first, each to the rank that has least so far.

    No rank then has more than an equal share and one matrix (Graham, 1969).

    >>> deal({"fc": 4, "q": 1, "k": 1, "v": 1, "out": 1}, ranks=2)
    {'fc': 0, 'q': 1, 'k': 1, 'v': 1, 'out': 1}
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):  # a stable sort: equal costs stay in the given order
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + costs[name], rank))
    return owners
