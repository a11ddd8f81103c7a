"""The computer around the accelerator: its processor's name, its memory, and how fast it multiplies.

A CPU has no published peak that a plan could use (it depends on instruction set, cores, cooling and
neighbours), so its speed is measured for a moment instead.
"""

import ctypes
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

MIB = 1 << 20
PRODUCT = {"cpu": 512, "mps": 4096}  # rows of the matrices; an accelerator would spend small products on launches


def cores() -> int:
    """Cores that this process may use: a job's share of a node, not the node.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name as a person would say it.

    >>> bool(processor())
    True
    """
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    if platform.system() == "Darwin":
        # platform.processor() says only "arm" there; this says "Apple M2 Max".
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        if told.returncode == 0 and told.stdout.strip():
            return told.stdout.strip()
    return platform.processor() or platform.machine() or "CPU"


def memory() -> int:
    """Bytes of the host's memory, or of the container's share where that is less.

    >>> memory() > 2**28
    True
    """
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(said)) if said.isdigit() else total


def synchroniser(device: str | torch.device) -> Callable[[], None]:
    """What a clock has to wait for: work on an accelerator is queued, and a call returns before it is done.

    >>> synchroniser("cpu")() is None
    True
    """
    place = torch.device(device)
    if place.type == "cpu":
        return lambda: None
    return torch.mps.synchronize if place.type == "mps" else partial(torch.cuda.synchronize, place)


def measure_flops(
    seconds: float = 0.3, device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 0
) -> float:
    """FLOP/s of products of square matrices, measured for a moment: what a plan rests on where no peak is published.

    `device` is "cpu", "cuda:1" (ROCm too), or "mps" for Apple's GPU (written without one at hand: never run there).
    The best of several short rounds counts: a neighbour's burst only ever makes a round slower. Taught in chapter
    06_mfu.

    >>> measure_flops(0.02) > 1e8
    True
    """
    size = size or PRODUCT.get(torch.device(device).type, 8192)
    wait, products = synchroniser(device), 4
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)  # the first product also starts the threads
    wait()
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right)
        wait()
        best = max(best, products * 2 * size**3 / (time.perf_counter() - start))
    return best


def reuse_freed_memory() -> str:
    """Keep memory that tensors gave back, instead of handing it to the system: said in one line what was done.

    glibc returns every freed block above a threshold to the kernel and asks for it again at the next tensor; the
    kernel then clears each page anew. An eager training step on a CPU allocates the same few hundred blocks again and
    again, and lost most of its time there (`bench/train.py` measures it). Costs nothing but that the process
    keeps its peak. Only Linux with glibc has these switches; elsewhere nothing is changed. Taught in 06_mfu.

    >>> reuse_freed_memory().startswith("freed memory")
    True
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "freed memory: left to the system's allocator (no glibc)"
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    # glibc documents half of its largest heap, 32 MiB, as the most for a block; some versions take more.
    kept = next((size for size in (1 << 30, 32 * MIB) if mallopt(mmap_threshold, size)), 0)
    untrimmed = mallopt(trim_threshold, (1 << 31) - 1)
    if not kept and not untrimmed:
        return "freed memory: mallopt refused, left as it was"
    blocks = f"blocks up to {kept // MIB:,} MiB" if kept else "small blocks only"
    return f"freed memory: {blocks} kept for the next tensor" + ("" if untrimmed else ", but the heap may still shrink")
