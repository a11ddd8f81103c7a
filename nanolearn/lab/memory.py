"""How much memory a piece of code takes at its worst: measured in a process of its own, and drawn, for chapter 03.

A peak is a property of a process, and the kernel of a notebook has one already, so each measurement is a new process.
It is forked from a small server that has imported torch and nothing else: a fresh interpreter each time would spend
its seconds on imports, and a fork of the kernel would begin with the kernel's peak. The same trap lies in
`ru_maxrss`: Linux keeps it through fork and exec, so a child says what its parent held. VmHWM belongs to the memory
itself. Where there is no such server (macOS, Windows) a fresh interpreter is started instead.
"""

import hashlib
import inspect
import multiprocessing
import runpy
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nanolearn.errors import UserError
from nanolearn.lab import plots
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.materialize import materialize

LINUX = sys.platform.startswith("linux")
WAIT = 1200  # seconds, at most, for one measurement
TWICE = 1.5  # times what stays: from here on a bar warns
EVERY = 0.005  # seconds between two looks at the resident memory
TINY = GPTConfig(n_layer=1, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, sequence_len=8, vocab_size=64)


@dataclass(frozen=True)
class Peak:
    """One measurement: bytes over what the process held before, and what is left of them.

    `peak` is the most that was resident, `stays` the bytes of the tensors that came back, `device` the most that was
    allocated on an accelerator (0 where none was used), `digest` a hash of names and values, `curve` seconds and
    resident bytes.
    """

    peak: int
    stays: int
    device: int
    seconds: float
    digest: str
    curve: list[tuple[float, int]]

    @property
    def ratio(self) -> float:
        """Peak over what stays: 1 for code that holds nothing twice."""
        return self.peak / self.stays


def measure(build: Callable[..., Any], *arguments: Any, limit: int = 0) -> Peak:
    """Call `build(*arguments)` in a new process and say how much memory it took there.

    Only the function's own text travels, so it imports what it uses; it returns a module, or tensors by name.
    `limit`: bytes that the process may allocate beyond what it holds. Raises MemoryError when it asked for more, or was
    killed; RuntimeError with its traceback when it failed otherwise; UserError for a limit where only Linux has one.

    Taught in chapter 03_meta_init.
    """
    if limit and not can_limit():
        raise UserError(f"memory can't be limited on {sys.platform}", "run this on Linux")
    context: Any = multiprocessing.get_context("forkserver" if LINUX else "spawn")
    if LINUX:
        context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    told: Any  # a Peak's fields, or what went wrong
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "measured.py"
        text.write_text(textwrap.dedent(inspect.getsource(build)), encoding="utf-8")
        child = context.Process(target=_child, args=(theirs, text, build.__name__, arguments, limit), daemon=True)
        child.start()
        theirs.close()
        try:
            kind, told = ours.recv() if ours.poll(WAIT) else ("late", f"no answer in {WAIT} s")
        except EOFError:
            child.join()
            kind = "memory" if (child.exitcode or 0) < 0 else "failed"
            told = f"the process ended with exit code {child.exitcode} (-9: the system wanted its memory)"
        finally:
            child.kill()
            child.join()
    if kind == "peak":
        return Peak(**told)
    raise (MemoryError if kind == "memory" else RuntimeError)(told)


def can_limit() -> bool:
    """Whether `measure` can hold a process to less memory than the machine has."""
    return LINUX


def _child(answer: Connection, text: Path, name: str, arguments: Sequence[Any], limit: int) -> None:
    """The measured process: warmed up, so that loaded code isn't taken for weights."""
    torch.set_num_threads(1)
    materialize(TINY, "cpu", seed=0)
    build = runpy.run_path(str(text))[name]
    with _Watch() as watch:
        if limit:
            _limit(limit)
        try:
            built = build(*arguments)
        except Exception as error:
            short = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            answer.send(("memory", str(error)) if short else ("failed", traceback.format_exc()))
            return
        seconds = time.perf_counter() - watch.begun
        peak = highest() - watch.before
    found = list(tensors(built))
    told = {"peak": peak, "seconds": seconds, "curve": watch.curve, "digest": digest(found), "device": on_device()}
    answer.send(("peak", told | {"stays": stays(found)}))


class _Watch:
    """Looks at the resident memory again and again while something else runs: torch lets other threads run."""

    def __init__(self) -> None:
        self.process, self.done, self.curve = psutil.Process(), threading.Event(), [(0.0, 0)]
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Watch":
        self.before, self.begun = self.process.memory_info().rss, time.perf_counter()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.done.wait(EVERY):
            self.curve.append((time.perf_counter() - self.begun, self.process.memory_info().rss - self.before))


def highest() -> int:
    """The most bytes that this process ever held resident.

    Source: proc(5) for VmHWM; getrusage(2), whose ru_maxrss is in bytes on macOS.
    """
    if LINUX:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limit(allowed: int) -> None:
    import resource

    held = psutil.Process().memory_info().data  # what RLIMIT_DATA counts: private memory that can be written
    resource.setrlimit(resource.RLIMIT_DATA, (held + allowed, held + allowed))


def on_device() -> int:
    """The most bytes that tensors took on a CUDA or ROCm device in this process; 0 where none was used."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def tensors(built: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that hold something, sorted by name: parameters and buffers of a module, or a mapping's own."""
    if isinstance(built, nn.Module):
        built = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    yield from ((name, tensor.detach()) for name, tensor in sorted(built.items()) if not tensor.is_meta)


def stays(found: Sequence[tuple[str, Tensor]]) -> int:
    """Bytes of the tensors' storages, each counted once: a tied weight has two names and one storage."""
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for _, tensor in found)}.values())


def digest(found: Sequence[tuple[str, Tensor]]) -> str:
    """One hash over names and values, so that weights can be compared without sending them."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in found:
        whole.update(name.encode())
        whole.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return whole.hexdigest()


def curves_figure(peaks: Mapping[str, Peak]) -> Figure:
    """Resident memory while a model is made, a line each; a dot where it was highest.

    The axis is the share of each one's own time: how long they took is told by the table.
    """
    fig, (axes,) = plots.figure(height=3.4)
    for (name, peak), style in zip(peaks.items(), ("-", "--", "-.", ":", "-", "--"), strict=False):
        x, y = [100 * at / peak.seconds for at, _ in peak.curve], [held / 1e6 for _, held in peak.curve]
        (line,) = axes.plot(x, y, style, label=name)
        axes.plot([x[y.index(max(y))]], [max(y)], "o", color=line.get_color(), markersize=4)
    plots.label(axes, "Memory while the weights are made", "share of the time it took (%)", "resident (MB)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_ylim(bottom=0)
    return fig


def peaks_figure(runs: Mapping[str, Sequence[Peak]]) -> Figure:
    """The highest of each way as a bar, from the smallest to the largest run as a whisker, and what stays as a mark."""
    fig, (axes,) = plots.figure(height=0.45 * len(runs) + 1.0)
    for row, several in enumerate(runs.values()):
        peaks = [run.peak / 1e6 for run in several]
        left = several[0].stays / 1e6
        over = max(peaks) / left > TWICE
        axes.barh(row, max(peaks), height=0.6, color=plots.ORANGE if over else plots.SKY)
        axes.plot([min(peaks), max(peaks)], [row, row], color="black", lw=2, solid_capstyle="butt")
        axes.plot([left, left], [row - 0.38, row + 0.38], color=plots.BLUE, lw=3)
        axes.text(max(peaks), row, f"  {max(peaks) / left:.2f}x", va="center", fontsize=9)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(run.peak for several in runs.values() for run in several) / 1e6)
    axes.grid(visible=False, axis="y")
    plots.label(axes, "Peak memory, and what stays of it", "resident (MB)", "")
    return fig


def losses_figure(losses: Mapping[str, Sequence[Sequence[float]]], chance: float) -> Figure:
    """Loss against steps, a colour for each way and a line for each seed; `chance` nats is what guessing gives."""
    fig, (axes,) = plots.figure(height=3.2)
    for (name, several), colour, style in zip(losses.items(), plots.PALETTE, ("-", "--", ":"), strict=False):
        for number, line in enumerate(several):
            axes.plot(line, style, color=colour, lw=1.2, label=None if number else name)
    axes.axhline(chance, color=plots.GREY, lw=5, alpha=0.3, label="guessing")
    plots.label(axes, "Loss while a part is dead", "step", "loss (nats/byte)")
    axes.legend(fontsize=8)
    return fig
