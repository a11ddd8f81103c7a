"""The picture of the pipeline: every chapter finds itself in it."""

import pytest

from nanolearn.lab import pipeline, plots


def coloured(fig) -> int:
    return sum(1 for text in fig.axes[0].texts if text.get_color() == "white")


@pytest.mark.parametrize("chapter", [f"{number:02d}" for number in range(15)])
def test_every_chapter_has_a_lit_part(chapter):
    lit = {name for name, _, chapters in pipeline.STAGES if chapter in chapters}
    assert lit
    assert coloured(pipeline.figure(lit)) == len(lit)


def test_the_whole_run_lights_everything_and_says_so(monkeypatch):
    shown = {}
    monkeypatch.setattr(plots, "show", lambda fig, **words: shown.update(words))
    pipeline.show("07")
    for name, passed, _ in pipeline.STAGES:
        assert name in shown["caption"]
        assert passed in shown["alt"]
