"""One style for every figure of the book, and one way to show it.

A figure is drawn without pyplot, so nothing is kept open and nothing is shown twice. It is shown as SVG
inside an HTML <figure> that carries its caption and its alternative text: that survives JupyterLab, a
static book page and a screen reader alike, which a bare image output does not (Jupyter has no place for
alt text).
"""

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import EngFormatter, MaxNLocator

# Okabe and Ito's palette (jfly.uni-koeln.de/color, 2008), told apart with any colour vision; the order
# alternates dark and light, so that neighbours differ in grey print too.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
PALETTE = (BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE)
GREY = "#6B6B6B"
WIDTH, HEIGHT = 7.2, 3.2  # inches; 7.2 fills the text column of the book at its 72 dots an inch

STYLE: Any = {
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "nanolearn",  # the same figure gives the same bytes
    "svg.fonttype": "path",  # the letters travel with the picture: no font is asked of the reader's machine
}
# For the whole process: matplotlib styles titles and legends when they are made, not when their figure is.
matplotlib.rcParams.update(STYLE)


def figure(columns: int = 1, *, rows: int = 1, height: float = HEIGHT, **layout) -> tuple[Figure, Sequence[Axes]]:
    """A styled figure and its axes as a flat sequence; `height` in inches a row.

    >>> fig, axes = figure(2)
    >>> len(axes), float(fig.get_figwidth())
    (2, 7.2)

    Taught in chapter 07_pretrain.
    """
    fig = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False, **layout)
    return fig, list(axes.flat)


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and labelled axes in one call; labels name their units, such as "loss (nats/token)".

    >>> _, (axes,) = figure()
    >>> label(axes, "Loss", "steps", "loss (nats/token)"); axes.get_ylabel()
    'loss (nats/token)'
    """
    axes.set(title=title, xlabel=x, ylabel=y)


def count_axis(axis) -> None:
    """Write an axis of large counts as 200 k, 1.5 M.

    >>> _, (axes,) = figure()
    >>> count_axis(axes.xaxis); axes.xaxis.get_major_formatter()(1.5e6).replace("\\N{MINUS SIGN}", "-")
    '1.5 M'
    """
    axis.set_major_formatter(EngFormatter())


def whole_numbers() -> MaxNLocator:
    """Marks of an axis that counts: at whole numbers only.

    >>> whole_numbers().tick_values(0, 2).tolist()
    [0.0, 1.0, 2.0]
    """
    return MaxNLocator(integer=True, min_n_ticks=1)


def svg(fig: Figure) -> str:
    """The figure as SVG text, without dates, so that the same figure gives the same text.

    >>> svg(figure()[0]).startswith("<svg")
    True
    """
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def render(fig: Figure, caption: str, alt: str) -> dict[str, str]:
    """The bundle that Jupyter shows: the picture with caption and alt text, and words for a terminal.

    >>> sorted(render(figure()[0], "Nothing yet.", "An empty plot."))
    ['text/html', 'text/plain']
    """
    if not caption.strip() or not alt.strip():
        raise ValueError("a figure has a caption and a text for readers who can't see it")
    image = base64.b64encode(svg(fig).encode()).decode()
    page = (
        f'<figure style="margin:0.5em 0"><img src="data:image/svg+xml;base64,{image}" '
        f'alt="{html.escape(alt, quote=True)}" style="max-width:100%;background:white"/>'
        f"<figcaption><em>{html.escape(caption)}</em></figcaption></figure>"
    )
    return {"text/html": page, "text/plain": f"[figure] {caption} {alt}"}


def show(fig: Figure, *, caption: str, alt: str) -> None:
    """Display a figure with its caption beneath and its alternative text inside.

    `caption` says what to see in it, in one or two sentences; `alt` says what is drawn, to who can't see it.
    """
    display(render(fig, caption, alt), raw=True)


def show_text(markdown: str) -> None:
    """Display Markdown; a log and a terminal get the same text."""
    display({"text/markdown": markdown, "text/plain": markdown}, raw=True)


def show_updating(fig: Figure, *, caption: str, alt: str) -> Callable[[str], None]:
    """Display a figure and return a function that redraws it in place, with a new caption."""
    handle = display(render(fig, caption, alt), raw=True, display_id=True)

    def update(caption: str) -> None:
        if handle is not None:  # outside a notebook there is nothing to redraw
            handle.update(render(fig, caption, alt), raw=True)

    return update
