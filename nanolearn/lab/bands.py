"""What stands behind a live curve, so that a reader can say "on track" or "not": earlier runs, and published ends.

Only what can be compared is drawn: the reader's own complete runs of the same depth, preset and corpus; published ends
only beside a full-preset run of the same depth on the same corpus, because bits per byte of other text say nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from nanolearn.errors import UserError
from nanolearn.lab import plots
from nanolearn.lab.curves import Curves, columns, thin
from nanolearn.recipe import Recipe
from nanolearn.train import records
from nanolearn.train.identity import RECIPE
from nanolearn.train.records import finished

LIGHT = "#B9B9B9"
MOST = 8  # earlier runs that are drawn: the newest


@dataclass(frozen=True)
class End:
    """Where a published run ended: bits per byte after `ratio` tokens a weight of blocks and head."""

    depth: int
    data: str
    ratio: float
    bpb: float


# Runs on 8xH100 of the lineage that the recipe follows (nanochat's public leaderboard). The record of ratio 8 names no
# corpus; its bits per byte are those of ClimbMix.
ENDS = (
    End(24, "fineweb-edu", 12, 0.74833),
    End(26, "fineweb-edu", 8.5, 0.74504),
    End(24, "climbmix", 9.5, 0.71854),
    End(24, "climbmix", 8, 0.71800),
)


def published(recipe: Recipe) -> list[tuple[float, float]]:
    """(tokens, bits per byte) at which published runs of this depth and corpus ended; none unless preset is full.

    >>> published(Recipe.from_depth(24, data="fineweb-edu"))
    [(8757706752, 0.74833)]
    >>> published(Recipe.from_depth(4, "laptop"))
    []

    Taught in chapter 07_pretrain.
    """
    if recipe.preset != "full":
        return []
    weights = Recipe.from_depth(recipe.depth, ratio=1, batch_tokens=recipe.sequence_len).tokens
    return [(end.ratio * weights, end.bpb) for end in ENDS if (end.depth, end.data) == (recipe.depth, recipe.data)]


def earlier(recipe: Recipe, run_dir: Path, runs: Path) -> list[Path]:
    """Complete runs in `runs` of the same depth, preset, corpus and vocabulary, newest first, without this one.

    Taught in chapter 07_pretrain.
    """
    found: list[Path] = []
    for path in sorted(runs.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        if path.parent.resolve() == run_dir.resolve() or len(found) == MOST:
            continue
        try:
            other = Recipe.load(path)
        except UserError:  # of another version of this package
            continue
        same = all(getattr(other, name) == getattr(recipe, name) for name in ("depth", "preset", "data", "vocab_size"))
        if same and finished(path.parent, other.digest):
            found.append(path.parent)
    return found


class Bands:
    """Earlier runs as thin grey lines and published ends as marks, on the two axes of a live curve.

    `words` is what a caption says of them. Taught in chapter 07_pretrain.
    """

    def __init__(self, ends: Sequence[tuple[float, float]], runs: Iterable[Path]) -> None:
        self.ends = list(ends)
        self.runs = [records.read(path) for path in runs]
        mine = f"{len(self.runs)} earlier run{'s' * (len(self.runs) > 1)} of this depth" if self.runs else ""
        theirs = "where published runs ended" if self.ends else ""
        said = " and ".join(part for part in (mine, theirs) if part)
        self.words = f"Grey: {said}." if said else ""

    def draw(self, loss_axes: Axes, bits_axes: Axes) -> None:
        """Draw them, once, behind what is drawn later."""
        label = "earlier runs"
        for history in self.runs:
            curves = Curves(history)
            _, tokens, loss = columns(curves.loss)
            loss_axes.plot(*thin(tokens, loss), color=LIGHT, linewidth=0.8, zorder=1, label=label)
            _, tokens, bits = columns(curves.bits)
            bits_axes.plot(tokens, bits, color=LIGHT, linewidth=0.8, zorder=1, label=label)
            _, tokens, bits = columns(curves.final)
            bits_axes.plot(tokens, bits, color=LIGHT, marker="*", linestyle="", zorder=1)
            label = "_one is enough in a legend"
        if self.ends:
            tokens, bits = map(list, zip(*self.ends, strict=True))
            bits_axes.plot(
                tokens, bits, color=plots.GREY, marker="D", markersize=6, linestyle="", zorder=1, label="published ends"
            )
            bits_axes.axhspan(min(bits) - 0.003, max(bits) + 0.003, color=LIGHT, alpha=0.4, linewidth=0, zorder=0)


def bands(recipe: Recipe, run_dir: Path, runs: Path) -> Bands:
    """What may stand behind the live curve of this run. Taught in chapter 07_pretrain."""
    return Bands(published(recipe), earlier(recipe, run_dir, runs))
