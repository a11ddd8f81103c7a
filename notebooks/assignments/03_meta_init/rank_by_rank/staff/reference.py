"""The reference: begins each stream at the counter in which the first own element lies."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from nanolearn.rng import key

NUMBERS = 4  # 64-bit numbers that one count of Philox gives


def init_rows(model: nn.Module, seed: int, rank: int, ranks: int) -> dict[str, Tensor]:
    rows = {}
    for name, p in model.named_parameters():
        each = -(-p.shape[0] // ranks)
        start, stop = (min(at * each, p.shape[0]) for at in (rank, rank + 1))
        width = math.prod(p.shape[1:])
        values = elements(key(seed, "init", name), start * width, stop * width)
        rows[name] = torch.from_numpy(values).view(stop - start, *p.shape[1:])
    return rows


def elements(stream: int, start: int, stop: int) -> np.ndarray:
    """Elements start to stop of a whole parameter (stop - start,), float32."""
    counts, skipped = divmod(2 * start, NUMBERS)
    generator = np.random.Generator(np.random.Philox(stream).advance(counts))
    u, v = generator.random(skipped + 2 * (stop - start))[skipped:].reshape(-1, 2).T
    return (0.02 * np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)).astype(np.float32)
