"""Pictures of byte-pair encoding for chapter 01: how a word is put together, and what vocabularies cost."""

from collections.abc import Callable, Mapping, Sequence

from ipywidgets import IntSlider, Text, VBox
from matplotlib.figure import Figure

from nanolearn.lab import dials, plots

Step = tuple[int, bytes]  # parts i and i + 1 become this token


def readable(token: bytes) -> str:
    """A token as it can be printed: spaces as a low line, bytes that are no text in hexadecimal.

    >>> readable(b" the"), readable(b"\\xe6")
    ('_the', 'E6')

    Taught in chapter 01_tokenizer.
    """
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return token.hex().upper()
    return text.replace(" ", "_") if text.isprintable() else token.hex().upper()


def tree(piece: bytes, steps: Sequence[Step], rank: Mapping[bytes, int]) -> Figure:
    """The merges of one piece, from its bytes below to its tokens above; each node with its token and its id.

    `steps` say one after the other which two neighbours are joined. `rank` gives the ids.

    >>> tree(b"low", [(0, b"lo"), (0, b"low")], {b"lo": 256, b"low": 257}).axes[0].get_title(loc="left")
    'From 3 bytes to 1 token in 2 merges'
    """
    parts = [(float(i), 0, piece[i : i + 1]) for i in range(len(piece))]
    fig, (axes,) = plots.figure(height=0.42 * _height(piece, steps) + 1.1)
    for x, _, token in parts:
        _node(axes, x, 0, readable(token), plots.GREY)
    for at, token in steps:
        left, right = parts[at : at + 2]
        x, y = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1
        for child in (left, right):
            axes.plot([child[0], x], [child[1] + 0.22, y - 0.22], color=plots.GREY, lw=0.9, zorder=0)
        parts[at : at + 2] = [(x, y, token)]
        _node(axes, x, y, f"{readable(token)}\n{rank[token]}", plots.BLUE)
    tokens = f"{len(parts)} token{'s' if len(parts) > 1 else ''}"
    axes.set(xlim=(-0.7, len(piece) - 0.3), ylim=(-0.5, _height(piece, steps) + 0.1))
    axes.set_title(f"From {len(piece)} bytes to {tokens} in {len(steps)} merges")
    axes.axis("off")
    return fig


def _height(piece: bytes, steps: Sequence[Step]) -> float:
    levels = [0] * len(piece)
    for at, _ in steps:
        levels[at : at + 2] = [max(levels[at : at + 2]) + 1]
    return max(levels) + 0.6


def _node(axes, x: float, y: float, text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": colour, "lw": 1.1}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, linespacing=1.1)


def bars(figures: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes a token by domain, a bar for each vocabulary.

    >>> len(bars({"German": {"ours": 3.0, "gpt2": 2.5}}).axes[0].containers)
    2
    """
    domains, names = list(figures), list(next(iter(figures.values())))
    fig, (axes,) = plots.figure(height=0.2 * len(domains) * len(names) + 0.9)
    high = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [row + (number - (len(names) - 1) / 2) * high for row in range(len(domains))]
        drawn = axes.barh(places, [figures[domain][name] for domain in domains], high, label=name)
        axes.bar_label(drawn, fmt="%.1f", padding=2, fontsize=7)
    axes.set(yticks=range(len(domains)), yticklabels=domains)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8)
    plots.label(axes, "How much text a token holds", "bytes a token", "")
    return fig


def sizes(vocabularies: Sequence[int], held: Sequence[float], cost: Mapping[str, Sequence[float]], unit: str) -> Figure:
    """Left: bytes a token against the size of a vocabulary. Right: what a byte costs each model, its least marked.

    >>> len(sizes([256, 512], [1.0, 2.0], {"small": [3.0, 2.0]}, "FLOP a byte").axes)
    2
    """
    fig, axes = plots.figure(2, height=2.9)
    axes[0].plot(vocabularies, held, "o-", markersize=4)
    plots.label(axes[0], "What a token holds", "tokens in the vocabulary", "bytes a token")
    for name, values in cost.items():
        least = min(range(len(values)), key=lambda i: values[i])
        (line,) = axes[1].plot(
            vocabularies, [value / values[least] for value in values], "o-", markersize=4, label=name
        )
        axes[1].plot(vocabularies[least], 1.0, "*", markersize=13, color=line.get_color())
    plots.label(axes[1], "What a byte costs", "tokens in the vocabulary", f"{unit}, least = 1")
    axes[1].legend(fontsize=8)
    for part in axes:
        part.set_xscale("log", base=2)
        part.set_xticks(vocabularies, [f"{v // 1024}k" if v >= 1024 else str(v) for v in vocabularies], fontsize=8)
        part.minorticks_off()
    return fig


def dial(word: str, merges: Callable[[bytes, int], Sequence[Step]], rank: Mapping[bytes, int]) -> VBox:
    """A word and how many merges the vocabulary has, over the figure of `tree`; without a kernel that figure stands.

    `merges(piece, limit)` gives the steps that the first `limit` merges of the vocabulary allow.

    Taught in chapter 01_tokenizer.
    """
    text = Text(word, description="piece", continuous_update=False)
    limit = IntSlider(len(rank), min=0, max=len(rank), step=max(1, len(rank) // 64), description="merges")

    def draw(word: str, limit: int) -> tuple[Figure, str, str]:
        piece = (word or " ").encode()[:24]
        steps = merges(piece, limit)
        caption = f"{word!r} with the first {limit:,} merges: {len(piece) - len(steps)} tokens."
        return tree(piece, steps, rank), caption, f"A tree of {len(steps)} merges over {len(piece)} bytes."

    return dials.dial({"word": text, "limit": limit}, draw)
