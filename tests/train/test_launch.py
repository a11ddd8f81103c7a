"""Starting a run: in this process, in several, or not at all on devices that are only simulated."""

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.hardware import cpu, detect
from nanolearn.recipe import Execution, Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train import launch as room
from nanolearn.train.launch import SimulatedLaunch, launch, prepare, set_aside
from nanolearn.train.records import only_writer, read


def test_one_device_trains_in_this_process_and_a_second_call_trains_nothing(tiny, tmp_path):
    seen, recipe = [], tiny.recipe()
    result = launch(recipe, tiny.execution(), tmp_path / "run", machine=cpu(), observers=[seen.append])
    assert result.complete
    assert seen == read(tmp_path / "run")
    again = launch(recipe, tiny.execution(), tmp_path / "run", machine=cpu(), observers=[seen.append])
    assert again == result
    assert seen == read(tmp_path / "run")


@pytest.mark.parametrize("name", ["8 x NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"])
def test_a_simulated_machine_stops_at_the_moment_of_launch(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NANOLEARN_SIMULATE", name)
    run, recipe = tmp_path / "run", Recipe.from_depth(24)
    with pytest.raises(SimulatedLaunch) as raised:
        launch(recipe, Execution(), run, machine=detect())
    said = str(raised.value)
    count = 8 if name.startswith("8") else 1
    assert said.startswith(f"simulated {name}: everything up to the launch was done: would start ")
    assert f"--nproc-per-node={count} -m nanolearn.train.launch {run}" in said
    assert "\n" not in said
    assert Recipe.load(run / "recipe.json") == recipe
    assert Execution.load(run / "execution.json") == Execution()
    assert not torch.cuda.is_initialized()


def test_c5_another_recipe_in_the_folder_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "8 x NVIDIA H100 80GB HBM3")
    with pytest.raises(SimulatedLaunch):
        launch(Recipe.from_depth(24), Execution(), tmp_path, machine=detect())
    with pytest.raises(UserError, match="another recipe"):
        launch(Recipe.from_depth(20), Execution(), tmp_path, machine=detect())
    assert Recipe.load(tmp_path / "recipe.json").depth == 24


def test_the_tokenizer_is_trained_once_and_a_run_keeps_its_own(tiny, tmp_path):
    said, recipe = [], tiny.recipe()
    _, first = prepare(recipe, tmp_path / "run", said.append)
    _, second = prepare(recipe, tmp_path / "run", said.append)
    assert first.digest == second.digest
    assert len(said) == 1
    own = Tokenizer([bytes([i]) for i in range(256)])
    own.save(tmp_path / "run" / "tokenizer")
    assert prepare(recipe, tmp_path / "run")[1].digest == own.digest


def test_set_aside_deletes_nothing_and_leaves_a_running_run_alone(tmp_path):
    run = tmp_path / "run"
    assert set_aside(run) is None
    for number in (1, 2):
        run.mkdir()
        (run / "note").write_text(str(number))
        assert set_aside(run) == tmp_path / f"run.before-{number}"
    assert [(tmp_path / f"run.before-{n}" / "note").read_text() for n in (1, 2)] == ["1", "2"]
    run.mkdir()
    with only_writer(run), pytest.raises(UserError, match="another process"):
        set_aside(run)


def test_what_a_worker_said_is_what_a_person_reads(tmp_path):
    log = tmp_path / "workers.log"
    log.write_text("noise\nnanolearn.errors.UserError: no corpus 'x': give one\nRoot Cause: exit 1\n")
    assert str(room._failure(log)) == "no corpus 'x': give one"
    log.write_text("noise\nTraceback (most recent call last):\n  File a\nZeroDivisionError: b\n")
    assert "ZeroDivisionError" in str(room._failure(log))


@pytest.mark.slow
def test_t6_two_cpu_processes_train_one_model_and_their_records_are_followed(tiny, tmp_path):
    run, seen = tmp_path / "run", []
    result = launch(
        tiny.recipe(steps=4), tiny.execution(num_devices=2, val_tokens=-1), run, machine=cpu(), observers=[seen.append]
    )
    assert result.complete
    assert result.bpb > 0
    assert seen == read(run)
    assert seen[0]["ranks"] == 2
    with pytest.raises(UserError, match="can't be divided"):
        launch(
            tiny.recipe(batch_tokens=32), tiny.execution(num_devices=2, micro_batch=1), tmp_path / "b", machine=cpu()
        )
