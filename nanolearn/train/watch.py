"""What stands guard over a run: steps that are not finite, spikes, the loss scale, signals, and the clock.

A step whose loss or gradient norm is not finite changes nothing: it is skipped on all ranks alike (they judge
the same reduced numbers), counted, and ends the run after a few in a row. It never enters the window that
spikes are measured against, and neither does the value being judged: with itself in a window of 128 no
z-score could pass 11.3. The window is saved with the checkpoint, so that a resumed run is guarded from its
first step.
"""

import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

WINDOW = 128
LEAST = 16  # values before a spread means anything
PATIENCE = 5  # skipped steps in a row before the run stops: one is bad luck, five are a broken run
SPIKE = 6.0  # standard deviations above the window's mean that are worth a line
SCALE_START, SCALE_FLOOR, SCALE_GROWS_AFTER = 2.0**16, 1.0, 1000


def z_score(value: float, window: Sequence[float]) -> float | None:
    """How many standard deviations a value lies from the mean of the values before it; None while there are few.

    >>> z_score(3.0, [0.0, 2.0] * 8)
    2.0
    >>> z_score(3.0, [1.0]) is None
    True
    """
    if len(window) < LEAST:
        return None
    mean = math.fsum(window) / len(window)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in window) / len(window))
    return (value - mean) / spread if spread else None


@dataclass(frozen=True)
class Verdict:
    """What to do with a step: `skip` its update, `stop` the run (the reason, or ""), `say` something (or "").

    Taught in chapter 07_pretrain.
    """

    skip: bool = False
    stop: str = ""
    say: str = ""
    loss_z: float | None = None
    norm_z: float | None = None


class Watch:
    """Judges each step by its loss and gradient norm, both already reduced over micro-steps and ranks.

    With `scaled` it also keeps the loss scale that float16 needs: halved when a gradient overflows, doubled
    after 1,000 good steps (Micikevicius et al., 2018, arXiv 1710.03740).

    >>> watch = Watch()
    >>> watch.judge(1, loss=float("nan"), norm=1.0).skip
    True
    >>> watch.skipped, watch.judge(2, loss=5.0, norm=1.0).skip
    (1, False)

    Taught in chapter 07_pretrain; the z-score in chapter 11_gpt2.
    """

    def __init__(self, scaled: bool = False) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        self.in_a_row = 0
        self.scaled = scaled
        self.scale = SCALE_START if scaled else 1.0
        self.good_steps = 0

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._not_finite(step, loss, norm)
        self.in_a_row = 0
        self._grow_scale()
        loss_z, norm_z = z_score(loss, self.losses), z_score(norm, self.norms)
        self.losses.append(loss)
        self.norms.append(norm)
        spike = loss_z is not None and loss_z > SPIKE
        say = f"step {step}: the loss {loss:.3f} is {loss_z:.1f} deviations above the last ones" if spike else ""
        return Verdict(say=say, loss_z=loss_z, norm_z=norm_z)

    def _not_finite(self, step: int, loss: float, norm: float) -> Verdict:
        self.skipped += 1
        self.good_steps = 0
        if self.scaled and math.isfinite(loss) and self.scale > SCALE_FLOOR:
            # Not a fault of the run: the scale was too large for float16, and finding that out costs a step.
            self.scale /= 2
            return Verdict(skip=True, say=f"step {step}: float16 overflowed, skipped; loss scale now {self.scale:g}")
        self.in_a_row += 1
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        say = f"step {step}: the {what} is not finite, the step was skipped ({self.skipped} so far)"
        stop = f"{say}; {PATIENCE} in a row" if self.in_a_row >= PATIENCE else ""
        return Verdict(skip=True, stop=stop, say=say)

    def _grow_scale(self) -> None:
        if not self.scaled:
            return
        self.good_steps += 1
        if self.good_steps == SCALE_GROWS_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict:
        """Plain values for a manifest."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "scale": self.scale,
            "good_steps": self.good_steps,
        }

    def restore(self, state: dict) -> None:
        """Take up a saved state. The scale is kept only where it is still used: dtype may change on resume."""
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        if self.scaled and state["scale"] > SCALE_FLOOR:
            self.scale, self.good_steps = state["scale"], state["good_steps"]


class Clock:
    """Where the seconds go, by activity; `before` is what earlier parts of the run (from its manifest) spent.

    >>> clock = Clock(begun=time.time())
    >>> clock.add("optimizer", 1.5)
    >>> clock.before = {"optimizer": 2.0}
    >>> clock.totals()["optimizer"]
    3.5
    """

    def __init__(self, begun: float) -> None:
        self.begun = begun  # time.time() at which this process's part of the run began
        self.before: dict[str, float] = {}
        self.seconds: dict[str, float] = {"start": 0.0}

    def add(self, activity: str, seconds: float) -> None:
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(activity, time.perf_counter() - start)

    def elapsed(self) -> float:
        return time.time() - self.begun

    def totals(self) -> dict[str, float]:
        """Seconds by activity over all parts of the run; what no activity claimed is "other"."""
        now = self.seconds | {"other": max(self.elapsed() - sum(self.seconds.values()), 0.0)}
        names = dict.fromkeys([*self.before, *now])
        return {name: self.before.get(name, 0.0) + now.get(name, 0.0) for name in names}


class KernelTime:
    """How long the optimizer's kernels of the last step took on a GPU, where the host only queues them.

    Two events cost nothing; they are read after the next step's wait, when both have passed.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        self.waiting = False

    def mark(self, which: int) -> None:
        if self.events:
            self.events[which].record()
            self.waiting = which == 1

    def take(self) -> float:
        """Seconds of the last marked pair, once; 0 where the host's clock already saw them."""
        if not self.waiting:
            return 0.0
        self.waiting = False
        return self.events[0].elapsed_time(self.events[1]) / 1e3


class Interrupts:
    """While it is entered, the first SIGTERM or SIGINT asks for a clean stop, a second SIGINT interrupts at once.

    Taught in chapter 07_pretrain.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.before: dict[int, Any] = {}

    def _ask(self, number: int, _frame) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python delivers signals nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point so far: of the GPU's allocator, else of this process.

    Taught in chapter 07_pretrain.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # Unix only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
