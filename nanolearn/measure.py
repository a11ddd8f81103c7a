"""What this machine really does, in at most three minutes, before a run that takes a day: `nanolearn doctor --full`.

A table says what a device could do; here each one multiplies matrices, all of them add up a buffer, the disks write
and read, the tokenizer encodes. One slow device makes every other wait, so the spread is told and the slow one named.
The page ends with hours and dollars of the run that is planned. Taught in chapter 14_scaling_out.
"""

import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import ProcessContext

from nanolearn import host
from nanolearn.data.hub import KNOWN
from nanolearn.doctor import Check
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import SIMULATE, Machine, choose_dtype, select
from nanolearn.paths import cache_dir, runs_dir
from nanolearn.plan import make_plan
from nanolearn.plan.costs import TOKENISE_RATE
from nanolearn.plan.page import duration
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import train

SLOW = 0.95  # of the median rate: below, a device is named
GPU_SECONDS = 3.0
REDUCED, DISK_BYTES, TEXT_BYTES, HUB_BYTES = 256 << 20, 256 << 20, 4 << 20, 32 << 20
REDUCE_SECONDS, DISK_SECONDS, HUB_SECONDS = 60.0, 8.0, 20.0  # the most that one measurement may take
SYNCED = 16  # MiB between two waits for the disk
LINKS = "set NCCL_DEBUG=INFO and look at the links between the devices (nvidia-smi topo -m, rocm-smi --showtopo)"
WORDS = ("the", "of", "and", "people", "history", "year", "river", "state", "built", "small", "long", "water", "great")


def examine(
    recipe: Recipe, execution: Execution, machine: Machine, online: bool = False, small: bool = False
) -> Iterator[Check]:
    """The measurements, each as soon as it is there, and what they mean for a run. `online` also reads from the Hub;
    `small` is for a quick look: tiny buffers, whose rates say little. Raises UserError for a simulated machine.

    Taught in chapter 14_scaling_out.
    """
    machine = select(machine, execution.device)
    if machine.simulated:
        raise UserError(f"{machine.label} can't be measured", f"unset {SIMULATE}")
    cut = 64 if small else 1
    yield builds(torch.version.cuda, torch.version.hip, *drivers())
    rates = matmul_rates(machine, str(choose_dtype(machine, execution.dtype).value), GPU_SECONDS / cut)
    yield spread(rates)
    processes = max(2 if machine.type == "cpu" else machine.count, 1)
    if processes > 1:
        size, remedy = (REDUCED, LINKS) if machine.type == "cuda" else (REDUCED // 8, "see what else the cores do")
        yield tried("all-reduce", lambda: reduce_rate(processes, machine.type, size // cut), remedy)
    for name, folder in (("cache", cache_dir()), ("runs", runs_dir())):
        elsewhere = f"set NANOLEARN_{name.upper()} to a disk that can be written"
        yield tried(f"{name} disk", partial(disk, name, folder, DISK_BYTES // cut), elsewhere)
    yield encoding(TEXT_BYTES // cut)
    if online:
        yield hub_rate(HUB_BYTES // cut)
    yield verdict(recipe, execution, machine, min(rates))


def tried(name: str, look: Callable[[], Check], remedy: str) -> Check:
    """A measurement, or the line that says why there is none: the page has to go on.

    >>> print(tried("links", lambda: 1 / 0, "look at them").found)
    not measured: division by zero

    Taught in chapter 14_scaling_out.
    """
    try:
        return look()
    except Exception as problem:
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[-1][:160]
        return Check(name, f"not measured: {said}", remedy)


def matmul_rates(machine: Machine, dtype: str, seconds: float = GPU_SECONDS) -> list[float]:
    """FLOP/s of large matrix products on each device, in the dtype that training uses; fp32 on a CPU and Apple's GPU.

    >>> from nanolearn.hardware import cpu
    >>> matmul_rates(cpu(), "float32", 0.02)[0] > 1e8
    True
    """
    if machine.type != "cuda":
        return [host.measure_flops(min(seconds, 1.0), machine.type)]
    return [host.measure_flops(seconds, f"cuda:{index}", getattr(torch, dtype)) for index in range(machine.count)]


def spread(rates: Sequence[float]) -> Check:
    """Whether the devices are alike; the slow ones are named, because all others will wait for them at every step.

    >>> print(spread([700e12, 702e12, 610e12]).remedy)
    device 2 is slow (610.0 TFLOP/s): look at its clock, heat and neighbours, or leave it out
    """
    middle = statistics.median(rates)
    slow = [f"device {i} is slow ({rate / 1e12:.1f} TFLOP/s)" for i, rate in enumerate(rates) if rate < SLOW * middle]
    many = f" each, slowest {min(rates) / middle:.1%} of that" if len(rates) > 1 else ""
    said = f"{middle / 1e12:.3g} TFLOP/s in matrix products{many}"
    return Check(
        "matrices", said, f"{'; '.join(slow)}: look at its clock, heat and neighbours, or leave it out" if slow else ""
    )


def reduce_rate(processes: int, kind: str, size: int, seconds: float = REDUCE_SECONDS) -> Check:
    """How fast all ranks add up a buffer of `size` bytes, as a line of the page. Taught in chapter 14_scaling_out."""
    rate = bus_rate(size, processes, reduce_seconds(processes, kind, size, seconds))
    link = "gloo" if kind != "cuda" else "NCCL or RCCL"
    return Check("all-reduce", f"{rate / 1e9:.2f} GB/s over {processes} processes ({link}, {size / 1e6:.0f} MB)")


def reduce_seconds(processes: int, kind: str, size: int, seconds: float = REDUCE_SECONDS) -> float:
    """The best time in which all ranks add up a buffer of `size` bytes.

    Raises TimeoutError after `seconds`: a link that hangs is what this looks for. Taught in chapter 06_mfu.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        told = Path(folder) / "seconds"
        port = free.getsockname()[1]
        free.close()
        _within(
            seconds, multiprocessing.spawn(_reduce, (processes, kind, size, port, str(told)), processes, join=False)
        )
        return float(told.read_text())


def _within(seconds: float, workers: ProcessContext) -> None:
    until = time.monotonic() + seconds
    try:
        while not workers.join(timeout=1.0):
            if time.monotonic() > until:
                raise TimeoutError(f"no answer from all {len(workers.processes)} processes in {seconds:.0f} s")
    finally:
        for process in workers.processes:
            process.kill()


def bus_rate(size: int, processes: int, seconds: float) -> float:
    """Bytes a second over the slowest link of a ring: each byte travels 2 (n - 1) / n times over it, so that the rate
    does not depend on how many ranks there are.

    >>> bus_rate(800, processes=8, seconds=1.0)
    1400.0
    """
    return size * 2 * (processes - 1) / processes / seconds


def _reduce(rank: int, processes: int, kind: str, size: int, port: int, told: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=processes)
    buffer = torch.ones(size // 4, device=device)
    times = []
    for _ in range(5):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(buffer)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
        buffer.fill_(1)
    if rank == 0:
        Path(told).write_text(str(min(times[1:])))
    dist.destroy_process_group()


def disk(name: str, folder: Path, size: int) -> Check:
    """Bytes a second written (until they are on the disk) and read back, past the page cache where Linux allows it."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        for at in range(max(1, size // len(block))):
            file.write(block)
            if at % SYNCED == SYNCED - 1:
                os.fsync(file.fileno())  # else a slow disk would be waited for at the end, however long
                if time.perf_counter() - begun > DISK_SECONDS:
                    break
        file.flush()
        os.fsync(file.fileno())
        size, written = file.tell(), time.perf_counter() - begun
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.read(1 << 24) and time.perf_counter() - begun < DISK_SECONDS:
            pass
        read, taken = file.tell(), time.perf_counter() - begun
    return Check(f"{name} disk", f"{size / written / 1e6:,.0f} MB/s written, {read / taken / 1e6:,.0f} MB/s read")


def encoding(size: int) -> Check:
    """Bytes of made-up English that one core encodes in a second, beside what plans assume."""
    chance = random.Random(0)
    made = [" ".join(chance.choices(WORDS, k=200)) for _ in range(max(1, size // 1000))]
    tokenizer = train(iter(made[:1000]), 280)
    begun = time.perf_counter()
    tokenizer.encode_batch(made, 1)
    rate = sum(map(len, made)) / (time.perf_counter() - begun)
    return Check("tokenizer", f"{rate / 1e6:.1f} MB/s a core on made-up text (plans assume {TOKENISE_RATE / 1e6:.1f})")


def hub_rate(size: int) -> Check:
    """Bytes a second from the Hub: the beginning of the validation shard of the corpus that full runs read."""
    from huggingface_hub import get_session, hf_hub_url

    corpus = KNOWN["climbmix"]
    url = hf_hub_url(corpus.repo, corpus.validation or "", repo_type="dataset", endpoint=os.environ.get("HF_ENDPOINT"))
    begun, read = time.perf_counter(), 0
    try:
        with get_session().stream("GET", url, headers={"Range": f"bytes=0-{size - 1}"}, timeout=20) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                read += len(part)
                if read >= size or time.perf_counter() - begun > HUB_SECONDS:
                    break
    except Exception as problem:  # whatever it is, this page has to go on and say it
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:160]
        return Check("hub", f"{corpus.repo} can't be read ({said})", "set HF_ENDPOINT to a mirror, or fetch elsewhere")
    rate = read / (time.perf_counter() - begun)
    return Check("hub", f"{rate / 1e6:.1f} MB/s from {corpus.repo} ({read / 1e6:.0f} MB, one connection)")


def drivers() -> tuple[str, str]:
    """The newest CUDA that NVIDIA's driver takes, and the ROCm of the system; "" for what isn't there."""
    told = ""
    if shutil.which("nvidia-smi"):
        try:
            told = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            told = ""  # doctor's line for torch says what the driver's tools list
    found = re.search(r"CUDA Version:\s*([\d.]+)", told)
    rocm = Path("/opt/rocm/.info/version")
    return found[1] if found else "", rocm.read_text().split("-")[0].strip() if rocm.exists() else ""


def builds(cuda: str | None, hip: str | None, driver: str, rocm: str) -> Check:
    """Whether the wheel's CUDA or HIP goes with the driver's or the system's. A driver takes all older CUDAs.

    >>> print(builds("12.8", None, "12.4", "").remedy)
    the driver takes CUDA 12.4 at most: update it, or install a torch built for an older CUDA
    """

    def parts(version: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", version)[:2])

    wheel = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "neither CUDA nor HIP"
    said = f"torch has {wheel}; the driver takes CUDA {driver or 'none'}, the system has ROCm {rocm or 'none'}"
    if cuda and driver and parts(cuda) > parts(driver):
        remedy = f"the driver takes CUDA {driver} at most: update it, or install a torch built for an older CUDA"
        return Check("builds", said, remedy)
    if hip and rocm and parts(hip)[:1] != parts(rocm)[:1]:
        return Check(
            "builds", said, f"install a torch built for ROCm {parts(rocm)[0]}, or use a container that has one"
        )
    return Check("builds", said)


def verdict(recipe: Recipe, execution: Execution, machine: Machine, rate: float) -> Check:
    """Hours and dollars of a run: at the share of the peak that a plan states, and no faster than `rate` (FLOP/s of the
    slowest device) allows. On a CPU the plan itself rests on that rate.

    Taught in chapter 06_mfu.
    """
    plan = make_plan(recipe, execution, machine, cpu_flops=rate)
    peak = execution.peak(machine, str(plan.dtype.value)) if machine.type == "cuda" else None
    if peak and plan.speed.mfu and rate / peak < plan.speed.mfu:
        plan = make_plan(recipe, execution, machine, mfu=rate / peak)
    hours, cost = plan.hours, plan.cost
    money = "" if cost is None else f", ${cost:,.0f} ({plan.price_basis})"
    said = f"{recipe.name}: {duration(hours)}{money}; {plan.speed.basis}"
    if peak:
        said += f"; matrices alone reach {rate / peak:.0%} of the peak, a bound on any run"
    return Check("this run", said, "" if plan.finishes else plan.problems[0])
