"""Pictures of packing plans for chapter 02: rows coloured by document, what is lost along the way, a dial to turn."""

from collections.abc import Mapping, Sequence

import numpy as np
from ipywidgets import IntSlider, VBox
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanolearn.data.packing import PACKERS, Plan, pack
from nanolearn.lab import dials, plots

BAR = 0.8  # height of a row, of the distance between two
GAP = 0.06  # of a token, between two pieces
DRAWN = 16  # rows of a panel, at most


def lost_along(plan: Plan, lengths: np.ndarray) -> np.ndarray:
    """After each row (R,): the share of the tokens of all documents begun so far that no row holds, or ever will.

    `lengths` (documents,) are what the plan was made from. A document that goes on later is not lost.

    >>> lengths = np.array([3, 9])
    >>> lost_along(pack(lengths, 6, "greedy_crop"), lengths).round(3).tolist()
    [0.667]

    Taught in chapter 02_packing.
    """
    row = np.repeat(np.arange(plan.n_rows), np.diff(plan.row_start))  # (P,)
    kept = np.bincount(plan.doc, weights=plan.length, minlength=len(lengths))  # (documents,)
    doc, first = np.unique(plan.doc, return_index=True)
    begun = np.bincount(row[first], weights=lengths[doc], minlength=plan.n_rows).cumsum()
    held = np.bincount(row[first], weights=kept[doc], minlength=plan.n_rows).cumsum()
    return 1 - held / begun


def colours(documents: int) -> list[str]:
    """A colour for each document: the palette again and again.

    >>> len(colours(8)), colours(8)[0] == colours(8)[6]
    (8, True)
    """
    return [plots.PALETTE[doc % len(plots.PALETTE)] for doc in range(documents)]


def draw_rows(axes: Axes, plan: Plan, lengths: np.ndarray, title: str) -> None:
    """One panel: a line for each row, a bar for each piece, its document's number in it; what is lost is hatched."""
    colour = colours(len(lengths))
    for row in range(min(plan.n_rows, DRAWN)):
        at = 0
        for piece in range(plan.row_start[row], plan.row_start[row + 1]):
            doc, size = int(plan.doc[piece]), int(plan.length[piece]) + 1
            _bar(axes, at, row, size, colour[doc], f"{doc}{'+' if plan.start[piece] else ''}" if size > 1 else "")
            at += size
        if at < plan.capacity:
            axes.add_patch(Rectangle((at, row - BAR / 2), plan.capacity - at, BAR, fc="white", ec=plots.GREY, ls=":"))
    kept = np.bincount(plan.doc, weights=plan.length, minlength=len(lengths)).astype(int)
    drawn, at = min(plan.n_rows, DRAWN), 0
    for doc in np.flatnonzero(lengths > kept).tolist():
        left = int(lengths[doc] - kept[doc])
        while left:  # hatched bars go on in the next line, as wide as a row
            line, x = divmod(at, plan.capacity)
            size = min(left, plan.capacity - x)
            place = (x, drawn + 0.4 + line - BAR / 2)
            axes.add_patch(Rectangle(place, size, BAR, fc="white", ec=colour[doc], hatch="////"))
            at, left = at + size, left - size
    lines = -(-at // plan.capacity)
    axes.axvline(plan.capacity, color=plots.GREY, lw=1)
    axes.set(xlim=(0, 1.02 * plan.capacity), ylim=(drawn + lines - 0.2, -0.7), yticks=range(0, drawn, 1 + drawn // 9))
    axes.xaxis.set_major_locator(plots.whole_numbers())
    axes.grid(visible=False)
    plots.label(axes, title, "tokens", "row")


def _bar(axes: Axes, at: float, row: int, size: int, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((at + GAP, row - BAR / 2), size - 2 * GAP, BAR, fc=colour, ec="none"))
    axes.text(at + size / 2, row, text, ha="center", va="center", fontsize=7, color="black")


def rows_figure(lengths: np.ndarray, capacity: int, packers: Sequence[str]) -> Figure:
    """The same documents in rows, a panel for each packer.

    >>> len(rows_figure(np.array([3, 9]), 6, ["concatenate", "greedy_crop"]).axes)
    2
    """
    plans = [pack(lengths, capacity, packer) for packer in packers]
    tallest = min(DRAWN, max(plan.n_rows for plan in plans))
    columns = 2 if len(plans) > 1 else 1
    fig, axes = plots.figure(columns, rows=-(-len(plans) // columns), height=0.19 * tallest + 1.2)
    for part, plan, packer in zip(axes, plans, packers, strict=False):
        draw_rows(part, plan, lengths, packer)
    for unused in axes[len(plans) :]:
        unused.remove()
    return fig


def lost_figure(curves: Mapping[str, np.ndarray], floor: float) -> Figure:
    """Share of tokens lost (R,) against rows packed, a curve for each packer; `floor` is drawn as a line.

    >>> lost_figure({"greedy_crop": np.array([0.1, 0.2])}, floor=0.1).axes[0].get_ylabel()
    'tokens lost (%)'
    """
    fig, (axes,) = plots.figure(height=3.4)
    for (name, lost), style in zip(curves.items(), ("-", "--", "-.", ":", "-", "--"), strict=False):
        axes.plot(np.arange(1, len(lost) + 1), 100 * lost, style, label=name)
    axes.axhline(100 * floor, color=plots.GREY, lw=1, label="floor: never go on in another row")
    plots.count_axis(axes.xaxis)
    plots.label(axes, "What is thrown away, as rows are packed", "rows packed", "tokens lost (%)")
    axes.legend(fontsize=8, loc="upper right", ncols=2)
    axes.set_ylim(-1, 62)
    return fig


def lengths_figure(corpora: Mapping[str, np.ndarray], row: int) -> Figure:
    """How long documents are: their share by number, and by tokens, up to each length; `row` is marked.

    >>> len(lengths_figure({"a": np.array([1, 5, 9])}, 4).axes)
    2
    """
    fig, axes = plots.figure(2, height=2.9, sharey=True)
    for name, lengths in corpora.items():
        ordered = np.sort(lengths)
        axes[0].plot(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), label=name)
        axes[1].plot(ordered, 100 * np.cumsum(ordered) / ordered.sum(), label=name)
    for part, what in zip(axes, ("documents", "tokens"), strict=True):
        part.axvline(row, color=plots.GREY, lw=1, ls=":")
        part.set_xscale("log")
        plots.label(part, f"Share of {what}", "document length (tokens)", f"{what} up to that length (%)")
    axes[0].legend(fontsize=8)
    return fig


def dial(lengths: np.ndarray) -> VBox:
    """Sliders for row length and packer over the figure of `rows_figure`; a reader without a kernel has that figure.

    Taught in chapter 02_packing.
    """
    names = list(PACKERS)
    capacity = IntSlider(17, min=4, max=32, description="row, tokens")
    which = IntSlider(len(names) - 2, min=0, max=len(names) - 1, description="packer")

    def draw(capacity: int, which: int) -> tuple[Figure, str, str]:
        plan = pack(lengths, capacity, names[which])
        caption = f"{names[which]}: {plan.n_rows} rows, {plan.utilisation:.0%} used, {plan.loss:.0%} lost."
        alt = f"{plan.n_rows} rows of {capacity} tokens filled with {len(lengths)} documents by {names[which]}."
        return rows_figure(lengths, capacity, [names[which]]), caption, alt

    return dials.dial({"capacity": capacity, "which": which}, draw)
