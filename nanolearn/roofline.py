"""The roofline: what a machine can reach at most, given how many FLOPs a piece of work makes of each byte it moves.

Peak FLOP/s say what the arithmetic units can do when they are fed. Memory feeds them `bandwidth` bytes a second, so
work that makes `intensity` FLOPs of a byte can't pass bandwidth x intensity, whatever the peak: a flat roof with a
slope on its left (Williams, Waterman & Patterson, 2009, CACM 52(4)). For known accelerators both numbers are the
maker's. A CPU has none that could be used, so both are measured, with matrix products and a copy: then a reader's
share is one of what this machine was seen to do.
"""

import time
from dataclasses import dataclass

import torch

from nanolearn import host
from nanolearn.devices import device_bandwidth, peak_flops
from nanolearn.errors import UserError
from nanolearn.hardware import SIMULATE, Machine, torch_device

SIZES = {"cpu": (512, 1024, 2048)}  # matrices tried for a peak: which one is fastest differs by processor
COPIED = {"cpu": 256 << 20}  # bytes, several times the largest cache


@dataclass(frozen=True)
class Roof:
    """Peak FLOP/s, memory bandwidth in bytes a second, and where the two come from.

    >>> roof = Roof(peak=100.0, bandwidth=10.0, source="made up")
    >>> roof.ridge, roof.attainable(2.0), roof.attainable(50.0)
    (10.0, 20.0, 100.0)

    Taught in chapter 06_mfu.
    """

    peak: float
    bandwidth: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on the peak is the bound, and below which memory is."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that work of so many FLOPs a byte can reach: min(peak, bandwidth x intensity)."""
        return min(self.peak, self.bandwidth * intensity)


def published(name: str, dtype: str = "bfloat16") -> Roof | None:
    """The roof of a device by the name that torch shows, from its maker's figures; None where one of them is missing.

    >>> round(published("NVIDIA H200").ridge), published("NVIDIA RTX A4000"), published("cpu")
    (206, None, None)

    Taught in chapter 06_mfu.
    """
    peak, bandwidth = peak_flops(name, dtype), device_bandwidth(name)
    return Roof(peak, bandwidth, f"{dtype} peak and bandwidth by the maker") if peak and bandwidth else None


def matmul_intensity(rows: int, inner: int, columns: int, itemsize: int = 4) -> float:
    """FLOPs a byte of (rows, inner) @ (inner, columns), when each matrix moves once: 2 FLOPs a multiply-add.

    >>> round(matmul_intensity(1, 4096, 4096), 2), round(matmul_intensity(4096, 4096, 4096))
    (0.5, 683)
    """
    moved = rows * inner + inner * columns + rows * columns
    return 2 * rows * inner * columns / (itemsize * moved)


def place(machine: Machine) -> torch.device:
    """The device on which a machine is measured, its first one. Raises UserError for a simulated machine.

    >>> from nanolearn.hardware import cpu
    >>> place(cpu())
    device(type='cpu')

    Taught in chapter 06_mfu.
    """
    if machine.simulated:
        raise UserError(f"{machine.label} can't be measured", f"unset {SIMULATE}")
    return torch_device(machine)


def measured(machine: Machine, dtype: str = "float32", seconds: float = 1.0) -> Roof:
    """The roof of the machine at hand: the best rate of square products of some sizes, and that of a large copy.

    `seconds` for each of the two. A neighbour on the same processor lowers both, so a busy machine has a low roof.
    Raises UserError for a simulated machine. Taught in chapter 06_mfu.

    >>> from nanolearn.hardware import cpu
    >>> measured(cpu(), seconds=0.05).ridge > 0
    True
    """
    device = str(place(machine))
    sizes = SIZES.get(machine.type, (host.PRODUCT.get(machine.type, 8192),))
    each = [host.measure_flops(seconds / len(sizes), device, getattr(torch, dtype), size) for size in sizes]
    what = f"{dtype} products of {' to '.join(str(sizes[i]) for i in sorted({0, len(sizes) - 1}))} rows, and a copy"
    return Roof(max(each), copy_rate(device, seconds), f"measured here: {what}")


def copy_rate(device: str = "cpu", seconds: float = 1.0, size: int = 0) -> float:
    """Bytes a second that a copy of `size` bytes moves, read and written; the best of some rounds.

    >>> copy_rate(seconds=0.02, size=1 << 22) > 1e8
    True
    """
    size = size or COPIED.get(torch.device(device).type, 1 << 30)
    here = torch.ones(size // 4, device=device)
    there, wait = torch.zeros_like(here), host.synchroniser(device)
    wait()
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        begun = time.perf_counter()
        there.copy_(here)
        wait()
        best = max(best, 2 * here.nbytes / (time.perf_counter() - begun))
    return best
