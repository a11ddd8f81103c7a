"""Figures: one style, and words for those who can't see them."""

import base64
import re

import pytest
from matplotlib.colors import to_rgb

from nanolearn.lab import plots


def drawn():
    fig, (axes,) = plots.figure()
    axes.plot([0, 1e6], [5, 3])
    plots.label(axes, "Loss", "tokens", "loss (nats/token)")
    plots.count_axis(axes.xaxis)
    return fig


def test_the_same_figure_gives_the_same_bytes():
    assert plots.svg(drawn()) == plots.svg(drawn())


def test_the_bundle_holds_picture_caption_and_alt_text():
    page = plots.render(drawn(), 'Falls & "settles".', "Loss <5 falls to 3.")["text/html"]
    image = base64.b64decode(re.search(r"base64,([^\"]+)\"", page)[1])
    assert image.startswith(b"<svg")
    assert image.rstrip().endswith(b"</svg>")
    assert 'alt="Loss &lt;5 falls to 3."' in page
    assert "<figcaption><em>Falls &amp; &quot;settles&quot;.</em>" in page


def test_a_text_reader_gets_the_words():
    assert plots.render(drawn(), "Caption.", "Alt.")["text/plain"] == "[figure] Caption. Alt."


@pytest.mark.parametrize(("caption", "alt"), [("", "alt"), ("caption", " ")])
def test_a_figure_without_words_is_refused(caption, alt):
    with pytest.raises(ValueError, match="caption"):
        plots.render(drawn(), caption, alt)


def test_no_figure_is_left_open():
    from matplotlib import pyplot

    plots.svg(drawn())
    assert pyplot.get_fignums() == []


def test_neighbouring_colours_differ_in_lightness_too():
    """Printed in grey, or seen with no colour vision at all, lines drawn together still differ."""
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(to_rgb, plots.PALETTE)]
    assert all(abs(a - b) > 0.1 for a, b in zip(light, light[1:], strict=False))
