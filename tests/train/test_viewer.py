"""A live run, watched: nothing is done to it, and what is said of it is in its records."""

import threading
import time

import pytest

from nanolearn.errors import UserError
from nanolearn.hardware import cpu
from nanolearn.train import launch as room
from nanolearn.train import viewer
from nanolearn.train.identity import set_aside
from nanolearn.train.launch import launch
from nanolearn.train.records import LAUNCHING, Records, only_writer, read
from nanolearn.train.viewer import held, so_far


def test_a_folder_is_held_while_somebody_trains_there(tmp_path):
    assert not held(tmp_path / "run")
    with only_writer(tmp_path / "run"):
        assert held(tmp_path / "run")
    assert not held(tmp_path / "run")
    with only_writer(tmp_path / "run", LAUNCHING):  # minutes, while text is fetched and no worker is there yet
        assert held(tmp_path / "run")
        with pytest.raises(UserError, match="another process"):
            set_aside(tmp_path / "run")
    assert not held(tmp_path / "run")


def test_a_launch_holds_the_folder_before_its_text_is_there(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(room, "prepare", lambda recipe, run_dir, say: seen.append(held(run_dir)) or ("source", "tok"))
    monkeypatch.setattr(room, "train", lambda *_, **__: seen.append(held(tmp_path / "run")))
    launch(tiny.recipe(), tiny.execution(), tmp_path / "run", machine=cpu())
    assert seen == [True, True]
    assert not held(tmp_path / "run")


def test_a_run_without_a_step_has_nothing_to_show(tiny, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(viewer.time, "sleep", interrupt)
    with only_writer(run), pytest.raises(UserError, match="not come to its first step"):
        launch(tiny.recipe(), tiny.execution(), run, machine=cpu(), say=lambda _: None)


def test_a_launch_where_another_trains_follows_to_the_end_and_hands_every_record_on(tiny, tmp_path):
    run, seen, said = tmp_path / "run", [], []
    begun = threading.Event()

    def pace(record):
        begun.set()
        time.sleep(0.05)

    recipe = tiny.recipe(steps=20)
    trains = threading.Thread(target=lambda: tiny.train(run, recipe, observers=[pace], val_tokens=64))
    trains.start()
    assert begun.wait(60)
    result = launch(recipe, tiny.execution(), run, machine=cpu(), observers=[seen.append], say=said.append)
    trains.join()
    assert result.complete
    assert result.steps == 20
    assert "only watches" in said[0]
    assert [record["step"] for record in seen if record["kind"] == "step"][-1] == 20
    assert len(read(run, "start")) == 1  # nothing was trained here


def test_an_interrupted_watcher_says_what_came_so_far_and_leaves_the_run_alone(tiny, tmp_path, monkeypatch):
    run, recipe, said = tmp_path / "run", tiny.recipe(), []
    tiny.train(run, val_tokens=64)
    (run / "result.json").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(viewer.time, "sleep", interrupt)
    with only_writer(run):
        result = launch(recipe, tiny.execution(), run, machine=cpu(), say=said.append)
    assert (result.complete, result.stopped, result.steps) == (False, "still running", 12)
    assert said[-1] == "no longer watching; the run goes on"
    assert result.bpb == read(run, "validation")[-1]["bpb"]
    assert set(result.seconds) == {"steps", "waiting for data"}
    assert sum(result.seconds.values()) == pytest.approx(sum(r["seconds"] for r in read(run, "step")))
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_a_run_that_died_without_a_result_is_said_to_have(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    tiny.recipe().save(run / "recipe.json")
    with Records(run, 0) as out:
        out.append({"kind": "start", "step": 0, "parameters": 7, "device": "a", "dtype": "float32"})
    result = so_far(run, "its process ended without a result")
    assert (result.steps, result.parameters, result.bpb, result.samples) == (0, 7, None, [])


def test_a_live_run_of_another_recipe_is_not_shown_as_this_one(tiny, tmp_path):
    run = tmp_path / "run"
    tiny.train(run)
    with only_writer(run), pytest.raises(UserError, match="another recipe"):
        launch(tiny.recipe(steps=5), tiny.execution(), run, machine=cpu())
