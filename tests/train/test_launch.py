"""Starting a run: in this process, in several, or not at all on devices that are only simulated."""

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import cpu, detect
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train import launch as room
from nanolearn.train.launch import SimulatedLaunch, launch, prepare
from nanolearn.train.records import read


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
    assert said.startswith(f"simulated {name}: everything up to the launch was done: would start ")
    if name.startswith("8"):
        assert f"--nproc-per-node=8 -m nanolearn.train.launch {run}" in said
    else:
        assert said.endswith("would start in this process")
    assert "\n" not in said
    assert Recipe.load(run / "recipe.json") == recipe
    assert Execution.load(run / "execution.json") == Execution()
    assert not torch.cuda.is_initialized()


def test_several_nodes_meet_where_they_are_told_and_no_context_is_made_here(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "8 x NVIDIA H100 80GB HBM3")
    recipe, nodes = Recipe.from_depth(24), Execution(nodes=2, rendezvous="node0:29500")
    with pytest.raises(SimulatedLaunch) as raised:
        launch(recipe, nodes, tmp_path / "run", machine=detect())
    said = str(raised.value)
    for words in (
        f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id={recipe.digest[:16]}",
        "--rdzv-conf=is_host=1,",
        "--nproc-per-node=8 -m nanolearn.train.launch",
    ):
        assert words in said
    assert "standalone" not in said
    assert nodes.world(detect()) == 16
    assert "is_host=0" in room.rendezvous(recipe, nodes, host=False)[-1]
    assert not torch.cuda.is_initialized()


def test_an_unbuilt_wish_is_refused_before_anything_is_fetched_or_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "open_source", lambda spec: pytest.fail("fetched"))
    for wish, said in (({"tracker": "wandb"}, "needs the package"), ({"attention": "flash3"}, "needs a GPU")):
        with pytest.raises(UserError, match=said):
            launch(tiny.recipe(), tiny.execution(**wish), tmp_path / "run", machine=cpu())
    monkeypatch.setenv("NANOLEARN_SIMULATE", "AMD Instinct MI300X")
    with pytest.raises(UserError, match="gfx942 is AMD's"):
        launch(Recipe.from_depth(24), Execution(attention="flash3"), tmp_path / "run", machine=detect())
    assert not (tmp_path / "run").exists()


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
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()  # killed before the last file was written
    assert prepare(recipe, tmp_path / "run")[1].digest == first.digest


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
    with pytest.raises(UserError, match="can't be shared alike"):
        launch(
            tiny.recipe(batch_tokens=32), tiny.execution(num_devices=2, micro_batch=1), tmp_path / "b", machine=cpu()
        )
