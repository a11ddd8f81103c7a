"""The two curves of a run, from its records: each step's loss, and bits per byte on validation text."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from nanolearn.lab import plots

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
        self.lines: list[Line2D] = []
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
        """Draw both curves on two axes; what it drew before is taken off."""
        for line in self.lines:
            line.remove()
        _, tokens, loss = columns(self.loss)
        self.lines = loss_axes.plot(*thin(tokens, loss), color=plots.BLUE)
        _, tokens, bits = columns(self.bits)
        dots: Any = {"color": plots.ORANGE, "marker": "o", "markersize": 4, "label": "a part, on the way"}
        self.lines += bits_axes.plot(tokens, bits, **dots)
        _, tokens, bits = columns(self.final)
        star: Any = {"color": plots.VERMILION, "marker": "*", "markersize": 10, "linestyle": "", "label": "at the end"}
        self.lines += bits_axes.plot(tokens, bits, **star)
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
