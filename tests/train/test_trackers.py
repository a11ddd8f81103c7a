"""Trackers hold what records.jsonl holds, once, whatever happened in between."""

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import mlflow
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nanolearn.errors import UserError
from nanolearn.train import trackers
from nanolearn.train.identity import refuse_unbuilt
from nanolearn.train.records import ASIDE, read
from nanolearn.train.trackers import MODULES, PROJECT, SCALARS, open_trackers

USUAL = {"save_every": 5, "val_tokens": 64, "val_every": 4, "sample_every": 6}


def recorded(run_dir) -> dict[str, list[tuple[int, float]]]:
    """The curves that records.jsonl holds: name -> (step, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read(run_dir, "step"):
        for name in SCALARS:
            if record[name] is not None:
                found.setdefault(name, []).append((record["step"], record[name]))
    found["validation_bpb"] = [(record["step"], record["bpb"]) for record in read(run_dir, "validation")]
    return found


def interrupted(tiny, run_dir, **fields) -> None:
    """Die at step 8, three steps after a checkpoint; then go on to the end."""

    def dying(record: dict) -> None:
        if record["kind"] == "step" and record["step"] == 8:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        tiny.train(run_dir, observers=(dying,), **USUAL, **fields)
    assert tiny.train(run_dir, **USUAL, **fields).complete
    assert (run_dir / ASIDE).exists()


def tensorboard(run_dir) -> tuple[dict[str, list[tuple[int, float]]], EventAccumulator]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    curves = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = [(each.step, each.value) for each in events.Scalars(tag)]
    return curves, events


def store(run_dir):
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def curve(client, run, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))


@pytest.mark.slow
def test_tensorboard_holds_the_records_once_also_after_a_kill_and_a_resume(tiny, tmp_path):
    run_dir = tmp_path / "run"
    interrupted(tiny, run_dir, tracker="tensorboard")
    curves, events = tensorboard(run_dir)
    # Event files hold fp32.
    rounded = {name: [(step, float(np.float32(value))) for step, value in c] for name, c in recorded(run_dir).items()}
    assert curves == rounded
    assert [step for step, _ in curves["loss"]] == list(range(1, 13))
    texts = {tag for tag in events.Tags()["tensors"] if tag.endswith("text_summary")}
    assert "recipe/text_summary" in texts
    (last,) = [each for each in read(run_dir, "sample") if each["prompt"] == "The history of" and each["step"] == 12][
        -1:
    ]
    kept = events.Tensors("sample/The history of/text_summary")[-1]
    assert kept.tensor_proto.string_val[0].decode() == last["prompt"] + last["text"]


@pytest.mark.slow
def test_mlflow_holds_the_records_once_also_after_a_kill_and_a_resume(tiny, tmp_path):
    run_dir = tmp_path / "run"
    interrupted(tiny, run_dir, tracker="mlflow")
    client, run = store(run_dir)
    assert run.info.status == "FINISHED"
    wanted = recorded(run_dir)
    for name in ("loss", "grad_norm", "rate", "loss_z", "norm_z"):
        # Steps 6 to 8 were told before the kill; promise 2 says that the resume computed the same numbers.
        assert curve(client, run, name) == sorted(wanted.get(name, [])), name
    assert [step for step, _ in curve(client, run, "tokens_per_second")] == list(range(1, 13))
    assert curve(client, run, "validation_bpb") == sorted(set(wanted["validation_bpb"]))
    assert run.data.params["steps"] == "12"
    folder = run_dir / "mlflow" / run.info.run_id / "artifacts" / "samples"
    last = [each for each in read(run_dir, "sample") if each["prompt"] == ""][-1]
    assert (folder / "00000012-no-prompt.txt").read_text() == last["text"]


@pytest.mark.slow
def test_a_run_that_stops_says_so_in_mlflow(tiny, tmp_path):
    tiny.train(tmp_path, tracker="mlflow", max_hours=1e-9)
    _, run = store(tmp_path)
    assert run.info.status == "KILLED"


class Service:
    """What trackio and wandb have in common, and remembers."""

    def __init__(self) -> None:
        self.inits: list[dict] = []
        self.logged: list[tuple[int, dict]] = []
        self.finished = 0

    def init(self, **settings):
        self.inits.append(settings)
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self.finish)

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_service_is_told_each_step_once_and_knows_the_run_again(name, tiny, tmp_path, monkeypatch):
    service = Service()
    faked(monkeypatch, name, service.init)
    interrupted(tiny, tmp_path / "run", tracker=name)
    losses = [(step, values["loss"]) for step, values in service.logged if "loss" in values]
    assert losses == recorded(tmp_path / "run")["loss"]
    first, second = service.inits
    assert first == second
    assert first["resume"] == "allow"
    assert first["config"]["steps"] == 12
    assert service.finished == 2
    assert (name == "wandb") == ("id" in first)


def test_a_loss_that_is_not_finite_is_a_gap_in_the_curve():
    seen = []

    class Noting(trackers.Tracker):
        def numbers(self, values, step):
            seen.append((step, values))

    Noting({})({"kind": "step", "step": 3, "loss": None, "rate": 1.0, "mfu": None})
    assert seen == [(3, {"rate": 1.0})]


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"none"}))
def test_a_missing_package_is_named_before_anything_is_fetched(name, tiny, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=rf"tracker={name} needs the package .*: pip install "):
        refuse_unbuilt(tiny.execution(tracker=name))


def faked(monkeypatch, name: str, init) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)


def test_a_tracker_that_fails_is_given_up_aloud_and_the_run_goes_on(tiny, tmp_path, monkeypatch, capfd):
    seen = []

    def log(values, step):
        seen.append(step)
        if step == 3:
            raise ConnectionError("no network")

    faked(monkeypatch, "wandb", lambda **_: SimpleNamespace(log=log, finish=lambda: None))
    assert tiny.train(tmp_path / "run", tracker="wandb", **USUAL).complete
    assert seen == [1, 2, 3]
    assert capfd.readouterr().err.count("tracker=wandb failed (ConnectionError: no network): the run goes on") == 1


def test_a_tracker_that_is_slow_does_not_hold_up_the_step():
    free, told = threading.Event(), []

    class Slow(trackers.Tracker):
        def numbers(self, values, step):
            assert free.wait(30)
            told.append(step)

        def close(self):
            told.append("closed")

    beside = trackers.Beside("slow", Slow({}))
    for step in (1, 2, 3):
        beside({"kind": "step", "step": step, "loss": 1.0})  # returns, though nothing can be told yet
    assert told == []
    free.set()
    beside.close()
    assert told == [1, 2, 3, "closed"]


def test_a_service_that_knows_no_key_is_a_plain_error_before_the_first_step(tiny, tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("No API key configured")

    faked(monkeypatch, "wandb", init)
    with pytest.raises(UserError, match=r"tracker=wandb can't be opened \(No API key configured\).*WANDB_MODE"):
        tiny.train(tmp_path / "run", tracker="wandb", **USUAL)


def test_without_a_tracker_nothing_is_written(tiny, tmp_path):
    run_dir = tmp_path / "run"
    assert open_trackers("none", run_dir, tiny.recipe(), 0) == ()
    assert not run_dir.exists()
