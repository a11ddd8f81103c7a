"""What travels from the loader to the model: rows of token numbers, and where they came from."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows on their way to the model: `inputs` and `targets` int64 (B, T), targets one token ahead, -1 = ignored.

    `row` is the global number of the first row, `epoch` the pass over the corpus that it belongs to, from 0.

    Taught in chapter 02_packing.
    """

    inputs: torch.Tensor  # (B, T)
    targets: torch.Tensor  # (B, T)
    row: int
    epoch: int
