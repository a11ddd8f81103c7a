"""What stands behind a live curve: only what can be compared with it."""

import json

import pytest

from nanolearn.lab import plots
from nanolearn.lab.bands import Bands, bands, earlier, published
from nanolearn.lab.live import LiveCurve
from nanolearn.recipe import Recipe
from nanolearn.train import records
from tests.lab.test_pretrain import result


def write_run(folder, recipe: Recipe, complete: bool = True) -> None:
    """A run as it lies on disk: 10 steps, three validations."""
    folder.mkdir(parents=True)
    recipe.save(folder / "recipe.json")
    lines = [{"kind": "step", "step": n, "tokens": 1000 * n, "loss": 5.0 / n**0.5} for n in range(1, 11)]
    for n, rows in ((5, 2), (10, 2), (10, 9)):
        lines.append({"kind": "validation", "step": n, "tokens": 1000 * n, "bpb": 3 - n / 10, "rows": rows})
    (folder / records.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / records.RESULT).write_text(result(recipe, complete=complete).model_dump_json())


def test_published_ends_stand_only_where_depth_preset_and_corpus_are_the_same():
    """FACTS: four reference runs; bits per byte of another text say nothing."""
    assert [bits for _, bits in published(Recipe.from_depth(24, data="climbmix"))] == [0.71854, 0.71800]
    assert [bits for _, bits in published(Recipe.from_depth(26, data="fineweb-edu"))] == [0.74504]
    assert published(Recipe.from_depth(24, data="fineweb-edu")) == [(pytest.approx(8.758e9, rel=1e-3), 0.74833)]
    for depth, preset, data in ((26, "full", "climbmix"), (12, "full", "climbmix"), (24, "gpu", "climbmix")):
        assert published(Recipe.from_depth(depth, preset, data=data)) == []
    assert published(Recipe.from_depth(24, "full", data="hf:me/mine")) == []


def test_earlier_runs_are_complete_ones_of_the_same_depth_preset_and_corpus_but_not_this_one(tmp_path):
    mine = Recipe.from_depth(4, "laptop", steps=100)
    for name, recipe, complete in (
        ("mine", mine, True),
        ("longer", Recipe.from_depth(4, "laptop", steps=200), True),
        ("seed", Recipe.from_depth(4, "laptop", steps=100, seed=1), True),
        ("stopped", Recipe.from_depth(4, "laptop", steps=300), False),
        ("deeper", Recipe.from_depth(5, "laptop", steps=100), True),
        ("other", Recipe.from_depth(4, "laptop", steps=100, data="climbmix"), True),
    ):
        write_run(tmp_path / name, recipe, complete)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "recipe.json").write_text("{")
    assert {path.name for path in earlier(mine, tmp_path / "mine", tmp_path)} == {"longer", "seed"}
    assert earlier(mine, tmp_path / "mine", tmp_path / "nowhere") == []


def test_a_live_curve_keeps_its_bands_and_says_what_they_are(tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr(plots, "show_updating", lambda fig, **words: captions.append)
    write_run(tmp_path / "seed", Recipe.from_depth(4, "laptop", steps=10, seed=1))
    behind = bands(Recipe.from_depth(4, "laptop", steps=10), tmp_path / "mine", tmp_path)
    with LiveCurve(steps=10, tokens=10_000, behind=behind) as curve:
        curve({"kind": "validation", "step": 5, "tokens": 5000, "bpb": 2.6, "rows": 2})
    assert "Grey: 1 earlier run of this depth." in captions[-1]
    assert list(curve.axes[0].lines[0].get_xdata()) == [1000.0 * n for n in range(1, 11)]
    assert len(curve.axes[1].lines) == 4  # two of the earlier run, two of this one
    assert Bands([], []).words == ""


def test_published_ends_are_seen_at_the_height_where_they_are():
    _, axes = plots.figure(2)
    behind = Bands(published(Recipe.from_depth(24, data="climbmix")), [])
    behind.draw(*axes)
    assert list(axes[1].lines[0].get_ydata()) == [0.71854, 0.71800]
    assert behind.words == "Grey: where published runs ended."
