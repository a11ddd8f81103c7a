"""What a run is: written whole, compared, and moved aside only where it is a run."""

from pathlib import Path

import pytest

from nanolearn.errors import UserError
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.identity import RECIPE, claim, kept_tokenizer, open_data, set_aside
from nanolearn.train.records import only_writer


def test_a_kill_while_the_tokenizer_is_written_does_not_block_the_run(tiny, tmp_path):
    run = tmp_path / "run"
    data = open_data(tiny.source, tiny.tokenizer)
    (run / "tokenizer").mkdir(parents=True)
    (run / "tokenizer" / "ranks.tiktoken").write_bytes(b"half")
    assert kept_tokenizer(run) is None
    claim(run, tiny.recipe(), tiny.execution(), tiny.tokenizer, data)
    assert kept_tokenizer(run).digest == tiny.tokenizer.digest


def test_a_tokenizer_of_another_size_is_refused_and_nothing_is_written(tiny, tmp_path):
    other = Tokenizer([bytes([i]) for i in range(256)])
    data = open_data(tiny.source, tiny.tokenizer)
    with pytest.raises(UserError, match="the tokenizer has 265 tokens and the recipe 300"):
        claim(tmp_path / "run", tiny.recipe(), tiny.execution(), other, data)
    assert not (tmp_path / "run").exists()


def test_set_aside_deletes_nothing_and_leaves_a_running_run_alone(tmp_path):
    run = tmp_path / "run"
    assert set_aside(run) is None
    for number in (1, 2):
        run.mkdir()
        Recipe.from_depth(number).save(run / RECIPE)
        assert set_aside(run) == tmp_path / f"run.before-{number}"
    assert [Recipe.load(tmp_path / f"run.before-{n}" / RECIPE).depth for n in (1, 2)] == [1, 2]
    run.mkdir()
    with only_writer(run), pytest.raises(UserError, match="another process"):
        set_aside(run)
    assert set_aside(run) == tmp_path / "run.before-3"  # a run that was killed before it wrote anything


def test_a_folder_that_is_no_run_is_never_moved_and_gets_no_lock(tmp_path):
    mine = tmp_path / "data"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no run's folder"):
        set_aside(mine)
    with pytest.raises(UserError, match="is a file"):
        set_aside(mine / "thesis.txt")
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_moved_is_one_line(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()

    def busy(self, target):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(UserError, match="can't be moved aside .Device or resource busy.: give another run_dir"):
        set_aside(run)


def test_t9_more_steps_on_resume_are_another_recipe_and_are_refused_before_anything_changes(tiny, tmp_path):
    """The schedule hangs on the horizon: with another one the rate would jump in the middle of a run."""
    tiny.train(tmp_path / "run", tiny.recipe(steps=6))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(UserError, match="another recipe"):
        tiny.train(tmp_path / "run", tiny.recipe(steps=12))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert {n: t for n, t in after.items() if n != ".lock"} == {n: t for n, t in before.items() if n != ".lock"}
    rates = [tiny.recipe(steps=steps).schedule().rate(5) for steps in (6, 12)]
    assert rates[1] > 2 * rates[0]  # what would have happened
