"""The process group: sums over real gloo processes, and a world of one that needs none."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import nanolearn
from nanolearn import distributed
from nanolearn.errors import UserError

RANK = """
import os
import torch
from nanolearn import distributed
from nanolearn.errors import UserError

world = distributed.start("cpu")
assert distributed.world() == world and world.size == 2, world
assert distributed.all_reduce_sum([world.rank + 1, 2**53]) == [3.0, 2.0**54]  # float64
assert distributed.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]

assert distributed.on_main(lambda: os.getpid()) == distributed.gather(os.getpid())[0]
def refuse():
    raise UserError("no", "yes")
try:
    distributed.on_main(refuse)
    raise SystemExit("went on")
except UserError as error:
    assert str(error) == "no: yes"
distributed.stop()
"""


@pytest.mark.slow
def test_t6_two_processes_form_a_group_and_sum(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    usual = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    usual |= {"PYTHONPATH": str(Path(nanolearn.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_a_world_of_one_needs_no_group():
    assert distributed.start("cpu") == distributed.World()
    assert distributed.reduce_sum_(torch.ones(2)).tolist() == [1.0, 1.0]


def test_ranks_wait_longer_than_a_corpus_takes_to_fetch(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    given = {}
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, **words: given.update(words))
    distributed.start("cpu")
    assert given["timeout"] >= timedelta(hours=1)


def test_t6_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun"):
        distributed.start("cpu")


def test_t6_a_group_that_cannot_form_is_refused_not_ignored(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="2 processes could not form a group"):
        distributed.start("cpu")
