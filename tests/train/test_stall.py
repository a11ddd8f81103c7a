"""A run that stands still: named within the set time, with stacks, and ended."""

import signal
import subprocess
import sys
import time

import pytest

from nanolearn.distributed import World
from nanolearn.train import stall
from nanolearn.train.stall import Pulse, Stalled, behind, limit
from tests.train.conftest import losses

SECONDS = 1.0
SCRIPT = """
import sys, time
from pathlib import Path
from nanolearn import distributed
from nanolearn.data import loader
from nanolearn.data.sources import open_source
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.trainer import train

run, rank = Path(sys.argv[1]), distributed.from_environment().rank
recipe = Recipe.load(run / "recipe.json")
if rank == 1:
    plain = loader.Loader.micro_batches
    def stuck(self, *given):
        for number, batch in enumerate(plain(self, *given)):
            if number >= 12:
                time.sleep(600)
            yield batch
    loader.Loader.micro_batches = stuck
train(recipe, Execution.load(run / "execution.json"), run, machine=cpu(), source=open_source(recipe.data),
      tokenizer=Tokenizer.load(sys.argv[2]))
"""


def test_who_came_least_far_is_behind_whatever_the_others_do_between_two_steps():
    beats = {0: (5, 3, "reduce"), 1: (4, 9, "validation"), 2: (4, 9, "validation"), 3: (5, 3, "reduce")}
    assert behind(beats) == [1, 2]
    assert behind({0: (5, 3, "reduce"), 1: (5, 3, "reduce")}) == [0, 1]  # a deadlocked collective


def test_a_long_start_and_a_long_save_are_no_stall():
    assert limit("start", 10) >= 3600
    assert limit("checkpoint", 10) >= 1800 + 600
    assert limit("data", 10) >= 2e9 / 1e6  # a shard of 2 GB at 1 MB/s
    assert limit("reduce", 10) == 600


def test_a_run_that_comes_on_is_left_alone_however_slow_and_0_minutes_is_never(tmp_path):
    with Pulse(tmp_path, World(), 0.3 / 60) as pulse, Pulse(tmp_path / "never", World(), 0):
        pulse.stepped(1)
        for _ in range(8):
            time.sleep(0.1)
            pulse.beat("data")
    assert not (tmp_path / "never").exists()
    assert not list((tmp_path / stall.FOLDER_NAME).glob("*.json"))


def test_one_device_that_waits_for_data_for_ever_raises_and_goes_on_afterwards(tiny, tmp_path, monkeypatch):
    from nanolearn.data.loader import Loader

    plain = Loader.micro_batches

    def stuck(self, *given):
        for number, batch in enumerate(plain(self, *given)):
            if number >= 9:
                time.sleep(8)
            yield batch

    tiny.train(tmp_path / "straight")
    with monkeypatch.context() as patched:
        patched.setattr(Loader, "micro_batches", stuck)
        patched.setattr(stall, "PATIENT", {stall.START: 6.0})
        with pytest.raises(Stalled) as raised:
            tiny.train(tmp_path / "run", stall_minutes=SECONDS / 60, save_every=2)
    said = str(raised.value)
    assert "rank 0 of 1 (step 5, data)" in said
    assert "goes on from step_00000004" in said
    assert "\n" not in said
    assert "prefetch.py" in (tmp_path / "run" / stall.FOLDER_NAME / "rank_0.txt").read_text()
    tiny.train(tmp_path / "run", save_every=100)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_a_run_that_hangs_before_its_first_step_is_named_too(tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(stall, "PATIENT", {})
        patched.setattr("nanolearn.train.trainer.materialize", lambda *_, **__: time.sleep(60))
        begun = time.monotonic()
        with pytest.raises(Stalled, match=r"rank 0 of 1 \(step 1, start\).*nothing was saved yet"):
            tiny.train(tmp_path / "run", stall_minutes=SECONDS / 60)
        assert time.monotonic() - begun < 30
    tiny.train(tmp_path / "run")
    assert losses(tmp_path / "run")


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_its_data_is_named_and_the_run_ends(tiny, tmp_path):
    run, script = tmp_path / "run", tmp_path / "script.py"
    run.mkdir()
    script.write_text(SCRIPT)
    tiny.tokenizer.save(tmp_path / "tokenizer")
    tiny.recipe(steps=1000).save(run / "recipe.json")
    tiny.execution(num_devices=2, stall_minutes=2 / 60, save_every=2, max_passes=1000).save(run / "execution.json")
    command = [sys.executable, "-m", "nanolearn.train.agent", "--standalone", "--nproc-per-node=2"]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, str(script), str(run), str(tmp_path / "tokenizer")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert time.monotonic() - begun < 90
    assert "behind: rank 1 of 2 (step 13, data)" in done.stderr
    assert "goes on from step_00000012" in done.stderr
    stack = (run / stall.FOLDER_NAME / "rank_1.txt").read_text()
    assert "__next__" in stack
    assert "stuck" in stack  # the thread that reads is in it, too
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
