"""Controls over a figure that redraw it: for readers with a kernel; beside it stands the figure for all others."""

from collections.abc import Callable, Mapping

from ipywidgets import HTML, ValueWidget, VBox
from matplotlib.figure import Figure

from nanolearn.lab import plots


def dial(controls: Mapping[str, ValueWidget], draw: Callable[..., tuple[Figure, str, str]]) -> VBox:
    """Controls by name, and below them what `draw` makes of their values: a figure, its caption and its alt text.

    The picture is an HTML widget. An Output widget would do the same, but nbclient answers each of its messages, and
    headless runs have hung there, the kernel idle and papermill waiting.

    >>> from ipywidgets import IntSlider
    >>> box = dial({"n": IntSlider(3)}, lambda n: (plots.figure()[0], f"{n} of them.", "Nothing is drawn."))
    >>> "3 of them." in box.children[-1].value
    True

    Taught in chapter 02_packing.
    """
    picture = HTML()

    def redraw(_: object = None) -> None:
        fig, caption, alt = draw(**{name: control.value for name, control in controls.items()})
        picture.value = plots.render(fig, caption, alt)["text/html"]

    for control in controls.values():
        control.observe(redraw, "value")
    redraw()
    return VBox([*controls.values(), picture])
