"""Stateless random streams: every random number is a function f(seed, purpose, names...).

A generator that is carried along has a state that must be saved, and that depends on who drew before. Here nothing is
carried: a row permutation is a function of (seed, epoch, shard), a weight block of (seed, parameter, block). So a
checkpoint holds no generator state, and initialisation is the same however the weights are divided over devices.
Weights are drawn on the CPU, because a CPU and a GPU generator with one seed give different numbers; that costs about
10 s for a billion weights, once a run.
"""

import hashlib

import numpy as np
import torch

BLOCK = 1 << 20  # weights a block: small enough to divide a table over ranks, large enough that seeding costs nothing


def key(seed: int, purpose: str, *names: str | int) -> int:
    """A 63-bit key for one stream.

    >>> key(0, "rows", 1) == key(0, "rows", 1), key(0, "rows", 1) == key(0, "rows", "1x")
    (True, False)
    """
    text = repr((int(seed), purpose, *map(str, names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *names: str | int) -> np.random.Generator:
    """A numpy generator for one purpose (Philox, a counter-based generator: Salmon et al., SC 2011).

    >>> int(stream(0, "rows", 3).integers(10)) == int(stream(0, "rows", 3).integers(10))
    True
    """
    return np.random.Generator(np.random.Philox(key(seed, purpose, *names)))


def torch_generator(seed: int, purpose: str, *names: str | int) -> torch.Generator:
    """A CPU torch generator for one purpose.

    >>> torch_generator(0, "sample").initial_seed() == key(0, "sample")
    True
    """
    return torch.Generator().manual_seed(key(seed, purpose, *names))


def _fill(tensor: torch.Tensor, seed: int, name: str, draw) -> torch.Tensor:
    flat = tensor.view(-1)
    # One block for all of them: a new one each time leaves holes of up to 28 MB in the heap.
    host = torch.empty(min(BLOCK, flat.numel()), dtype=torch.float32)
    for start in range(0, flat.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        draw(host[: part.numel()], torch_generator(seed, "init", name, start // BLOCK))
        part.copy_(host[: part.numel()])
    return tensor


@torch.no_grad()
def fill_normal_(tensor: torch.Tensor, std: float, seed: int, name: str) -> torch.Tensor:
    """Fill a contiguous tensor with N(0, std), block by block; the same numbers on every device.

    >>> a = fill_normal_(torch.empty(4, 3), 0.1, seed=0, name="head")
    >>> bool((a == fill_normal_(torch.empty(4, 3), 0.1, seed=0, name="head")).all())
    True

    Taught in chapter 03_meta_init.
    """
    return _fill(tensor, seed, name, lambda host, g: host.normal_(0.0, std, generator=g))


@torch.no_grad()
def fill_uniform_(tensor: torch.Tensor, low: float, high: float, seed: int, name: str) -> torch.Tensor:
    """Fill a contiguous tensor with U(low, high), block by block; the same numbers on every device.

    >>> a = fill_uniform_(torch.empty(1000), -1.0, 1.0, seed=0, name="gate")
    >>> bool(a.abs().max() <= 1)
    True

    Taught in chapter 03_meta_init.
    """
    return _fill(tensor, seed, name, lambda host, g: host.uniform_(low, high, generator=g))
