"""Settling a run, and its report: no training here, the notebook's own test does that."""

import json
import time

import pytest

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.lab import plots, pretrain
from nanolearn.recipe import Recipe
from nanolearn.train import records
from nanolearn.train.records import Result

DEFAULTS = {
    "depth": 2,
    "preset": "auto",
    "data": "auto",
    "run_dir": "",
    "seed": 0,
    "resume": True,
    "rehearsal": False,
    "overrides": "steps=10",
}


@pytest.fixture
def on_cpu(monkeypatch):
    from nanolearn import hardware

    monkeypatch.setattr(hardware, "detect", hardware.cpu)


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(plots, "show", lambda fig, **words: found.append((fig, words)))
    return found


def settle(**changed):
    return pretrain.settle(**(DEFAULTS | changed), begun=time.time())


def result(recipe: Recipe, **changed) -> Result:
    spent = {"start": 20.0, "forward and backward": 150.0, "optimizer": 30.0}
    values = {
        "name": recipe.name, "recipe": recipe.digest, "complete": True, "stopped": "complete", "steps": recipe.steps,
        "tokens": recipe.tokens, "parameters": 1, "loss": 3.0, "bpb": 1.6, "validation_bytes": 10, "whole_split": True,
        "seconds": spent, "first_step_seconds": 12.0, "tokens_per_second": 1e3, "mfu": None, "peak_memory": 1,
        "skipped": 0, "device": "cpu", "dtype": "float32", "samples": [],
    }  # fmt: skip
    return Result(**(values | changed))


def write(folder, *lines: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / records.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_same_parameters_name_the_same_directory_and_others_another(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path))
    assert settle().folder == settle(overrides="steps=10 micro_batch=2").folder == tmp_path / settle().recipe.name
    others = {settle(**c).folder for c in ({"seed": 1}, {"overrides": "steps=11"}, {"depth": 1}, {"rehearsal": True})}
    assert len(others | {settle().folder}) == 5
    assert settle(run_dir=str(tmp_path / "mine")).folder == tmp_path / "mine"


def test_settling_touches_nothing(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("NANOLEARN_CACHE", str(tmp_path / "cache"))
    settle()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dept", "Depth"])
def test_a_parameter_added_to_the_cell_is_refused_with_the_nearest_right_one(name):
    with pytest.raises(UserError, match=f"unknown parameter '{name}': did you mean 'depth'"):
        settle(**{name: 6})


def test_a_renamed_or_removed_parameter_is_refused_in_one_line():
    without = {name: value for name, value in DEFAULTS.items() if name != "seed"}
    with pytest.raises(UserError, match="unknown parameter 'sede': did you mean 'seed'"):
        pretrain.settle(**without, sede=0, begun=0.0)
    with pytest.raises(UserError, match="parameter 'seed' is missing"):
        pretrain.settle(**without, begun=0.0)


def test_an_unbuilt_wish_is_refused_before_the_plan(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "8 x NVIDIA H100 80GB HBM3")
    with pytest.raises(UserError, match="tracker=wandb needs the package wandb"):
        settle(depth=24, overrides="tracker=wandb")
    monkeypatch.setenv("NANOLEARN_SIMULATE", "AMD Instinct MI300X")
    with pytest.raises(UserError, match="attention=flash3: gfx942 is AMD's"):
        settle(depth=24, overrides="attention=flash3")


def test_an_accelerator_gets_the_full_recipe_and_the_large_corpus(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "8 x NVIDIA H100 80GB HBM3")
    run = settle(depth=24, overrides="")
    assert run.recipe == Recipe.from_depth(24)
    assert "climbmix" in run.why[1]
    assert settle(depth=24, overrides="", data="fineweb-edu").why[1] == "data fineweb-edu: asked for"


def test_a_horizon_of_more_than_40_passes_never_runs_on_the_small_corpus(on_cpu, capsys):
    run = settle(overrides="tokens=2e8 max_passes=1000 max_hours=1e6")
    with pytest.raises(UserError, match="passes over the embedded corpus"):
        pretrain.accept(run)
    assert "REFUSED" in capsys.readouterr().out


def test_a_complete_run_is_reported_and_never_refused(on_cpu, capsys):
    wishes = "tokens=2e8 max_passes=1000 max_hours=1e6"
    run = settle(overrides=wishes)
    run.folder.mkdir(parents=True)
    (run.folder / records.RESULT).write_text(result(run.recipe).model_dump_json())
    done = settle(overrides=wishes)
    assert done.done is not None
    pretrain.accept(done)
    pretrain.prepare(done)
    assert "nothing will be trained" in capsys.readouterr().out
    assert settle(overrides=wishes, resume=False).done is None


def test_a_resumed_run_is_planned_for_what_is_left(on_cpu):
    run = settle()
    write(run.folder, {"kind": "checkpoint", "step": 4}, {"kind": "checkpoint", "step": 8})
    assert settle().plan.tokens_left == 2 * run.recipe.batch_tokens
    assert settle(resume=False).plan.tokens_left == run.recipe.tokens


@pytest.mark.parametrize(("depth", "preset", "devices"), [(1, "laptop", 1), (24, "full", 8), (12, "gpu", 1)])
def test_a_rehearsal_keeps_width_vocabulary_and_row_length(depth, preset, devices):
    recipe = Recipe.from_depth(depth, preset)
    short, execution = pretrain.rehearse(recipe, Execution(), devices)
    for name in ("n_embd", "n_head", "vocab_size", "sequence_len", "data", "packer", "window"):
        assert getattr(short, name) == getattr(recipe, name)
    assert short.n_layer == min(depth, 4)
    assert (short.steps, short.rows_per_step, execution.micro_batch) == (2, devices, 1)
    assert execution.val_tokens > 0


def test_the_report_draws_what_the_records_say(on_cpu, shown):
    run = settle()
    steps = [{"kind": "step", "step": n, "tokens": 100 * n, "loss": 8.0 - n} for n in range(1, 6)]
    write(run.folder, *steps, {"kind": "validation", "step": 5, "tokens": 500, "bpb": 1.61})
    pretrain.curves(run, guess=2.0)
    ((fig, words),) = shown
    assert fig.axes[0].lines[0].get_ydata().tolist() == [7.0, 6.0, 5.0, 4.0, 3.0]
    assert "7.00 and ends at 3.00" in words["caption"]
    assert "1.61" in words["alt"]
    assert [axes.get_ylabel() for axes in fig.axes] == ["loss (nats per token)", "loss (bits per byte)"]


@pytest.mark.parametrize(("scale", "unit"), [(1, "seconds"), (10, "minutes"), (100, "hours")])
def test_seconds_add_up_and_their_unit_fits(shown, scale, unit):
    spent = {"start": 20.0 * scale, "forward and backward": 150.0 * scale, "optimizer": 30.0 * scale}
    shares = pretrain.seconds(result(Recipe.from_depth(1, "laptop"), seconds=spent, first_step_seconds=None))
    assert shares == pytest.approx({"start": 0.1, "forward and backward": 0.75, "optimizer": 0.15})
    assert shown[0][0].axes[0].get_xlabel() == unit


def test_samples_of_one_prompt_in_the_order_of_the_run(on_cpu, capsys):
    run = settle()
    write(run.folder, *({"kind": "sample", "step": n, "prompt": p, "text": f"{n}\n{p}"} for n in (5, 10) for p in "ab"))
    pretrain.samples(run, "b")
    assert capsys.readouterr().out == "step      5: b | 5 b\nstep     10: b | 10 b\n"


def test_without_a_checkpoint_loading_says_so(on_cpu):
    with pytest.raises(UserError, match="has no checkpoint"):
        pretrain.load(settle())
