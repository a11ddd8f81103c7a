"""The result file: what the last cell leaves, and that it never leaves half."""

import json

import pytest

from nanolearn.lab import results


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path))
    return tmp_path


def test_it_adds_to_the_trainers_result_and_points_to_the_run(runs, capsys):
    folder = runs / "gpt-d4"
    folder.mkdir()
    (folder / "result.json").write_text('{"bits_per_byte": 1.6, "steps": 700}')
    results.finish("07_pretrain", {"guess": 2.0}, folder)
    written = json.loads((folder / "result.json").read_text())
    assert written == {"bits_per_byte": 1.6, "steps": 700, "notebook": {"name": "07_pretrain", "guess": 2.0}}
    assert json.loads((runs / "latest.json").read_text()) == {
        "run_dir": str(folder),
        "notebook": "07_pretrain",
    }
    assert capsys.readouterr().out == f"run directory: {folder}\n"


def test_a_second_time_replaces_only_the_notebooks_part(runs):
    for guess in (2.0, 1.5):
        results.finish("07_pretrain", {"guess": guess}, runs / "new")
    assert json.loads((runs / "new" / "result.json").read_text()) == {"notebook": {"name": "07_pretrain", "guess": 1.5}}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_a_value_that_is_no_json_leaves_the_old_file(runs, bad):
    results.finish("07_pretrain", {"bits": 1.5}, runs / "new")
    with pytest.raises((ValueError, TypeError)):
        results.finish("07_pretrain", {"bits": bad}, runs / "new")
    assert json.loads((runs / "new" / "result.json").read_text())["notebook"]["bits"] == 1.5
    assert [path.name for path in (runs / "new").iterdir()] == ["result.json"]


def test_a_chapter_that_trains_no_run_has_a_folder_of_its_own(runs, capsys):
    results.finish("02_packing", {"lost": 0.1})
    path = runs / "chapters" / "02_packing" / "result.json"
    assert json.loads(path.read_text()) == {"notebook": {"name": "02_packing", "lost": 0.1}}
    assert capsys.readouterr().out == f"results: {path}\n"
    assert not (runs / "latest.json").exists()
