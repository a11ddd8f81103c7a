"""A run seen while it happens: an observer of the trainer's records that draws in the notebook.

Redrawing a figure costs 0.05 to 0.3 s of a core that also trains, so its own cost sets its pace: it is
redrawn at most once in 100 times what the last redraw took (1% of the time), and never more often than
every 2 s. In between, a line of text is replaced; that costs a thousandth of it. Headless, papermill's log
shows only the first state of a display, so a plain line is printed now and then too: every 30 s at first,
later every twentieth of the time so far.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from IPython.display import display
from matplotlib.axes import Axes

from nanolearn.lab import plots
from nanolearn.train.records import clock, step_line

SHARE = 0.01  # of the time that passes may go into drawing
SOONEST = 2.0  # seconds
LINE_EVERY, LINE_SHARE = 30.0, 0.05
QUIET = "No step was taken here; what is drawn was recorded before."
ALT = "Two curves against tokens seen: left the training loss, right the bits per byte on validation text."
POINTS = 300  # a screen column or so each; a run of 30,000 steps draws as quickly as one of 300


def thin(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` means of neighbouring values, so that a long curve is cheap and its noise is averaged.

    >>> [part.tolist() for part in thin([1, 2, 3, 4], [4.0, 2.0, 1.0, 1.0], points=2)]
    [[1.5, 3.5], [3.0, 1.0]]
    """
    groups = min(points, len(x))
    if groups == 0:
        return np.empty(0), np.empty(0)
    edges = np.linspace(0, len(x), groups, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(edges, len(x)))
    return _means(x, edges, sizes), _means(y, edges, sizes)


def _means(values: Sequence[float], edges: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.add.reduceat(np.asarray(values, dtype=np.float64), edges) / sizes


class Curves:
    """The two curves of a run, apart from how they are shown: each step's loss, and bits per byte.

    Each is a list of (step, tokens seen, value).

    >>> Curves([{"kind": "step", "step": 1, "tokens": 512, "loss": 8.3}]).loss
    [(1, 512, 8.3)]
    """

    def __init__(self, history: Iterable[dict] = ()) -> None:
        self.loss: list[tuple[int, int, float]] = []
        self.bits: list[tuple[int, int, float]] = []
        self.final: list[tuple[int, int, float]] = []
        self.rows = 0  # of a validation on the way
        for record in history:
            self.add(record)

    def add(self, record: dict) -> None:
        kind = record.get("kind")
        if kind == "step" and record["loss"] is not None:  # a step that gave no number is a gap, not a zero
            self.loss.append((record["step"], record["tokens"], record["loss"]))
        elif kind == "validation":
            # The last validation reads more text than those on the way: another measurement, so no part of the curve.
            self.rows = min(record.get("rows", 0), self.rows or record.get("rows", 0))
            kept = self.bits if record.get("rows", 0) == self.rows else self.final
            kept.append((record["step"], record["tokens"], record["bpb"]))
        elif kind == "start":  # a resume: steps beyond it belong to a history that is gone
            for points in (self.loss, self.bits, self.final):
                points[:] = [point for point in points if point[0] <= record["step"]]

    def draw(self, loss_axes: Axes, bits_axes: Axes) -> None:
        """Draw both curves on two axes; what was there before is taken off."""
        for axes in (loss_axes, bits_axes):
            for line in list(axes.lines):
                line.remove()
        _, tokens, loss = columns(self.loss)
        loss_axes.plot(*thin(tokens, loss), color=plots.BLUE)
        _, tokens, bits = columns(self.bits)
        bits_axes.plot(tokens, bits, color=plots.ORANGE, marker="o", markersize=4, label="a part, on the way")
        _, tokens, bits = columns(self.final)
        bits_axes.plot(tokens, bits, color=plots.VERMILION, marker="*", markersize=10, linestyle="", label="at the end")
        for axes in (loss_axes, bits_axes):
            axes.relim()
            axes.autoscale_view()


def columns(points: Sequence[tuple[int, int, float]]) -> tuple[list, list, list]:
    """Steps, tokens and values of a curve as three lists.

    >>> columns([(1, 512, 8.3), (2, 1024, 7.9)])
    ([1, 2], [512, 1024], [8.3, 7.9])
    """
    return tuple(map(list, zip(*points, strict=True))) if points else ([], [], [])  # type: ignore[return-value]


def name_axes(loss_axes: Axes, bits_axes: Axes) -> None:
    """Titles, quantities and units of a run's two curves, live and in its report."""
    plots.label(loss_axes, "Training loss", "tokens seen", "loss (nats per token)")
    plots.label(bits_axes, "Validation", "tokens seen", "loss (bits per byte)")
    for axes in (loss_axes, bits_axes):
        plots.count_axis(axes.xaxis)


class LiveCurve:
    """An observer of a run's records, for `with LiveCurve(...) as curve: train(..., observers=[curve])`.

    `steps` and `tokens` are the whole run's; `history` holds the records before a resume. The last picture
    stays in the notebook as a static one. `seconds` is what drawing cost altogether.

    Taught in chapter 07_pretrain.
    """

    def __init__(
        self,
        steps: int,
        tokens: int,
        history: Iterable[dict] = (),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps, self.timer, self.curves = steps, timer, Curves(history)
        self.fig, self.axes = plots.figure(2, height=2.6)
        name_axes(*self.axes)
        for axes in self.axes:
            axes.set_xlim(0, 1.03 * tokens)
        self.seconds, self.last, self.step_seconds = 0.0, "", 0.0
        # Fixed margins, with room for wider numbers: solving a layout anew would double what a redraw costs.
        self.fig.set_layout_engine(None)
        self.fig.subplots_adjust(left=0.1, right=0.96, bottom=0.2, top=0.88, wspace=0.3)
        self.start = self.timer()
        self.status = display({"text/plain": "waiting for the first step"}, raw=True, display_id=True)
        self.redraw = plots.show_updating(self.fig, caption="Waiting for the first step.", alt=ALT)
        self.next_line = self.next_status = self.start
        self.next_figure = self.start + max(SOONEST, (self.timer() - self.start) / SHARE)

    def __call__(self, record: dict) -> None:
        self.curves.add(record)
        now = self.timer()
        if record.get("kind") == "step":
            self._step(record, now)
        elif record.get("kind") == "validation":
            print(f"validation at step {record['step']}: {record['bpb']:.4f} bits per byte", flush=True)
        elif "say" in record:
            print(record["say"], flush=True)
        if now >= self.next_figure:
            self._figure()

    def _step(self, record: dict, now: float) -> None:
        self.step_seconds += (0.1 if self.step_seconds else 1.0) * (record["seconds"] - self.step_seconds)
        self.last = step_line(record, self.steps, (self.steps - record["step"]) * self.step_seconds)
        if now >= self.next_line:
            print(self.last, flush=True)
            self.next_line = now + max(LINE_EVERY, LINE_SHARE * (now - self.start))
        if now >= self.next_status and self.status is not None:
            self.status.update({"text/plain": self.last}, raw=True)
            self.next_status = now + SOONEST

    def _figure(self) -> None:
        began = self.timer()
        self.curves.draw(*self.axes)
        self.redraw(f"After {clock(began - self.start)}: {self.last}." if self.last else QUIET)
        ended = self.timer()
        self.seconds += ended - began
        self.next_figure = ended + max(SOONEST, (ended - began) / SHARE)

    def close(self) -> None:
        """Draw the last state; nothing stays open."""
        if self.status is not None:
            self.status.update({"text/plain": self.last or "no step was taken here"}, raw=True)
        self._figure()

    def __enter__(self) -> "LiveCurve":
        return self

    def __exit__(self, *_) -> None:
        self.close()
