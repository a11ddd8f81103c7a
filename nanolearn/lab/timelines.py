"""A simulated device with queues, and pictures of who did what when, for chapter 04.

A real accelerator works through queues of its own: the host puts a copy or a computation there and goes on at once. A
CPU has no such queue, so here threads that sleep stand for it. What they show is the order of things and who waits for
whom; how long a real device takes is not simulated.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanolearn.data.batch import Batch
from nanolearn.lab import plots

READ, COPY, COMPUTE = "read", "copy", "compute"
TENSORS = 2  # a batch is copied as two, inputs and targets
BAR = 0.78  # height of a bar, of the distance between two lanes


class Span(NamedTuple):
    """One piece of work: where, for which row of the run, from when to when (seconds of time.perf_counter)."""

    lane: str
    row: int
    begun: float
    ended: float


class Timeline:
    """Spans of work, added by any thread while it works.

    >>> line = Timeline()
    >>> line.add("compute", 0, 0.0, 1.0); line.add("compute", 1, 3.0, 4.0)
    >>> line.busy("compute"), line.idle("compute")
    (2.0, 0.5)

    Taught in chapter 04_prefetching.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, lane: str, row: int, begun: float, ended: float) -> None:
        """Put a span on record."""
        self.spans.append(Span(lane, row, begun, ended))  # one append: safe from any thread

    @contextmanager
    def span(self, lane: str, row: int) -> Iterator[None]:
        """Put on record what happens inside."""
        begun = time.perf_counter()
        yield
        self.add(lane, row, begun, time.perf_counter())

    def of(self, lane: str) -> list[Span]:
        """The spans of one lane, in order."""
        return sorted((span for span in self.spans if span.lane == lane), key=lambda span: span.begun)

    def busy(self, lane: str) -> float:
        """Seconds of work in a lane, which does one thing at a time."""
        return sum(span.ended - span.begun for span in self.of(lane))

    def idle(self, lane: str) -> float:
        """Share of the time from a lane's first begin to its last end in which it did nothing."""
        spans = self.of(lane)
        return 1 - self.busy(lane) / (spans[-1].ended - spans[0].begun)


def slow(batches: Iterable[Batch], seconds: float | Iterator[float], timeline: Timeline) -> Iterator[Batch]:
    """The same batches from a reader made slow on purpose: a disk that takes so many seconds a batch (or the next of
    `seconds`). Each read is put on record.

    >>> list(slow([], 0.1, Timeline()))
    []

    Taught in chapter 04_prefetching.
    """
    for batch in batches:
        with timeline.span(READ, batch.row):
            time.sleep(seconds if isinstance(seconds, int | float) else next(seconds))
        yield batch


class Mark(threading.Event):
    """A place in a stream; `synchronize` waits until the stream has come there."""

    def synchronize(self) -> None:
        """Wait, without end."""
        self.wait()


class Stream:
    """Work done in order by a thread of its own: `put` returns at once, as a launch does on a device.

    >>> stream, done = Stream(), []
    >>> stream.put(lambda: done.append(1)).synchronize(); done
    [1]
    >>> stream.close()

    Taught in chapter 04_prefetching.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self._jobs: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simulated stream", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object] = lambda: None) -> Mark:
        """Queue a job; the mark says when it is done."""
        mark = Mark()
        self._jobs.put((job, mark))
        return mark

    def _run(self) -> None:
        for job, mark in iter(self._jobs.get, None):
            try:
                job()
            except Exception as error:
                self.errors.append(error)  # a stream that ends here would leave its waiters waiting
            mark.set()

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        self._jobs.put(None)
        self._thread.join()


class SimulatedDevice:
    """A device made of two threads: one computes, one copies. Its copies move the bytes at the end of their time.

    A copy of a batch takes `copy_seconds`. With `queues=False` it behaves as a CPU does: each call returns when its
    work is done. It is a `nanolearn.data.prefetch.Link`, so the package's own staging runs on it.

    Taught in chapter 04_prefetching.
    """

    def __init__(self, copy_seconds: float = 0.0, queues: bool = True) -> None:
        self.copy_seconds, self.queues = copy_seconds, queues
        self.timeline = Timeline()
        self._computing, self._copying = Stream(), Stream()
        self._copies = 0

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """A host buffer of that shape; nothing is page-locked here."""
        return torch.empty_like(like)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Queue a copy: its target is filled later, with what `host` holds by then."""
        target, number = torch.zeros_like(host), self._copies // TENSORS
        self._copies += 1

        def job() -> None:
            with self.timeline.span(COPY, number):
                time.sleep(self.copy_seconds / TENSORS)
                target.copy_(host)

        self._queued(self._copying.put(job))
        return target

    def record(self) -> Mark:
        """The place after all copies queued so far."""
        return self._copying.put()

    def await_on_device(self, event: Mark, tensors: tuple[torch.Tensor, ...]) -> None:
        """What is computed from now on waits for the event; the host does not."""
        self._computing.put(event.synchronize)

    def compute(self, seconds: float, row: int, looked_at: Callable[[], int] | None = None) -> None:
        """Queue a computation on a batch. `looked_at`, if given, says when it runs which row it really sees."""

        def job() -> None:
            begun = time.perf_counter()
            seen = looked_at() if looked_at else row
            time.sleep(seconds)
            self.timeline.add(COMPUTE, seen, begun, time.perf_counter())

        self._queued(self._computing.put(job))

    def synchronize(self) -> None:
        """The host waits until all that was queued is done; what failed there is raised here."""
        for stream in (self._copying, self._computing):
            stream.put().synchronize()
            if stream.errors:
                raise stream.errors.pop()

    def _queued(self, mark: Mark) -> None:
        if not self.queues:
            mark.synchronize()

    def __enter__(self) -> "SimulatedDevice":
        return self

    def __exit__(self, *error: object) -> None:
        self._copying.close()
        self._computing.close()


def draw(axes: Axes, timeline: Timeline, lanes: Sequence[str], until: float, title: str) -> None:
    """One panel: a line for each lane, a bar for each span with its row, colours by row; `until` in seconds."""
    first = min(span.begun for span in timeline.spans)
    for place, lane in enumerate(lanes):
        for span in timeline.of(lane):
            begun, width = 1e3 * (span.begun - first), 1e3 * (span.ended - span.begun)
            if begun < 1e3 * until:
                colour = plots.PALETTE[span.row % len(plots.PALETTE)]
                axes.barh(place, width, left=begun, height=BAR, color=colour, edgecolor="white", linewidth=0.8)
                if width > 0.01 * 1e3 * until:
                    middle = begun + width / 2
                    axes.text(middle, place, str(span.row), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set(xlim=(0, 1e3 * until), ylim=(len(lanes) - 0.5, -0.5), yticks=range(len(lanes)), yticklabels=lanes)
    axes.grid(visible=False, axis="y")
    plots.label(axes, title, "", "")


def figure(panels: Mapping[str, Timeline], lanes: Sequence[str], until: float) -> Figure:
    """Timelines one above the other, on one time axis of `until` seconds.

    >>> line = Timeline()
    >>> line.add("read", 0, 0.0, 1.0)
    >>> figure({"one batch": line}, ["read"], until=2.0).axes[0].get_xlabel()
    'time (ms)'
    """
    fig, axes = plots.figure(rows=len(panels), height=0.29 * len(lanes) + 0.55, sharex=True)
    for part, (title, timeline) in zip(axes, panels.items(), strict=True):
        draw(part, timeline, lanes, until, title)
    axes[-1].set_xlabel("time (ms)")
    return fig


def depth_figure(predicted: Mapping[int, float], measured: Mapping[int, Sequence[float]]) -> Figure:
    """Share of the time that the device waits against how many batches may lie ready: a line for what was computed, a
    point for each measurement.

    >>> depth_figure({1: 0.2, 2: 0.1}, {1: [0.2, 0.3], 2: [0.1]}).axes[0].get_ylabel()
    'device waits (% of time)'
    """
    fig, (axes,) = plots.figure()
    axes.plot(list(predicted), [100 * share for share in predicted.values()], "-", label="computed from the read times")
    for number, (depth, shares) in enumerate(measured.items()):
        label = "" if number else f"measured, {len(shares)} times each"
        axes.plot([depth] * len(shares), [100 * share for share in shares], "o", color=plots.VERMILION, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(predicted), [str(depth) for depth in predicted])
    axes.set_ylim(bottom=-1)
    plots.label(axes, "How far to read ahead", "batches ready at most (depth)", "device waits (% of time)")
    axes.legend()
    return fig
