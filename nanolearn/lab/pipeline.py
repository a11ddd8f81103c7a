"""The picture that every chapter opens with: from text to a trained model, its own part lit."""

from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from nanolearn.lab import plots

# name, what passes to the next stage, the chapters that teach it
STAGES = (
    ("text", "documents", ("07",)),
    ("tokenizer", "token shards", ("01", "07")),
    ("packing", "rows of T+1", ("02", "07")),
    ("prefetch", "a batch on the device", ("04", "07")),
    ("model", "loss", ("00", "03", "05", "06", "07", "11")),
    ("optimizer", "new weights", ("06", "07", "08", "09", "14")),
    ("checkpoint", "a trained model", ("07", "12")),
    ("evaluation", "", ("07", "10", "13")),
)
ROW = 4  # stages in a row of the picture


def figure(lit: Collection[str]) -> Figure:
    """The pipeline with the stages named in `lit` in colour.

    >>> figure({"packing"}).axes[0].get_title(loc="left")
    'From text to a trained model'
    """
    return chain("From text to a trained model", [(name, passed) for name, passed, _ in STAGES], lit)


def chain(title: str, stages: Sequence[tuple[str, str]], lit: Collection[str] = ()) -> Figure:
    """Boxes in rows of four, each with what it passes on; the ones named in `lit` in colour.

    >>> len(chain("Two parts", [("table", "(1, 3, 8)"), ("norm", "")]).axes[0].patches)
    3

    Taught in chapter 00_model.
    """
    rows = -(-len(stages) // ROW)
    fig, (axes,) = plots.figure(height=1.1 * rows + 0.4)
    axes.set(xlim=(-0.45, ROW - 0.7), ylim=(-rows + 0.45, 0.5))
    axes.set_title(title)
    axes.axis("off")
    for number, (name, passed) in enumerate(stages):
        x, y = number % ROW, -(number // ROW)
        on = name in lit
        face, edge = (plots.BLUE, plots.BLUE) if on else ("white", plots.GREY)
        axes.add_patch(FancyBboxPatch((x - 0.36, y - 0.15), 0.6, 0.3, boxstyle="round,pad=0.04", fc=face, ec=edge))
        colour = "white" if on else plots.GREY
        axes.text(x - 0.06, y, name, ha="center", va="center", color=colour, fontweight="bold" if on else None)
        turn = number % ROW == ROW - 1
        if number + 1 < len(stages):
            _arrow(axes, x, y, last=turn)
        place = (ROW / 2 - 0.56, y - 0.64) if turn else (x + 0.44, y - 0.34)
        axes.text(*place, passed, ha="center", va="center", fontsize=8.5, color=plots.GREY)
    return fig


def _arrow(axes, x: float, y: float, last: bool) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "color": plots.GREY}
    if not last:
        axes.add_patch(FancyArrowPatch((x + 0.28, y), (x + 0.6, y), **style))
        return
    # down, back to the left edge, and down again into the next row
    corner = [(x - 0.06, y - 0.19), (x - 0.06, y - 0.52), (-0.06, y - 0.52), (-0.06, y - 0.81)]
    for (x0, y0), (x1, y1) in zip(corner[:2], corner[1:3], strict=True):
        axes.plot([x0, x1], [y0, y1], color=plots.GREY, linewidth=1)
    axes.add_patch(FancyArrowPatch(corner[2], corner[3], **style, shrinkA=0))


def show(chapter: str) -> None:
    """Show where a chapter stands, by its number.

    Taught in chapter 07_pretrain.
    """
    lit = [name for name, _, chapters in STAGES if chapter in chapters]
    flow = ", ".join(f"{name} gives {passed}" if passed else name for name, passed, _ in STAGES)
    plots.show(
        figure(lit),
        caption=f"Where we are. This chapter's part is coloured: {', '.join(lit)}.",
        alt=f"A chain of boxes: {flow}.",
    )
