"""Background processes: they stay ahead, nothing depends on them, and none outlives its starter."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data import ahead
from nanolearn.data.ahead import Job, Team, share
from nanolearn.data.shard import TokenShard
from nanolearn.errors import UserError
from nanolearn.fetch import locked
from nanolearn.tokenizer import Tokenizer


class Shop:
    """Some shards of text, and a team that makes them."""

    def __init__(self, folder: Path, documents: int = 3, processes: int = 2) -> None:
        self.folder, self.tokenizer = folder, Tokenizer([bytes([i]) for i in range(256)])
        self.tokenizer.save(folder / "tokenizer")
        self.said: list[str] = []
        self.asked: list[int] = []
        self.refusal: UserError | None = None
        self.texts = [f"document {i} " * 20 for i in range(documents)]
        pq.write_table(pa.table({"text": self.texts}), folder / "text.parquet", row_group_size=100)
        self.team = Team(processes, self.path, self.job, self.said.append)

    def path(self, index: int) -> Path:
        return self.folder / f"shard_{index}.arrow"

    def job(self, index: int) -> Job:
        self.asked.append(index)
        if self.refusal:
            raise self.refusal
        text, place = str(self.folder / "text.parquet"), str(self.folder / "tokenizer")
        labels = {"source": "shop", "shard": str(index)}
        return Job(text, str(self.path(index)), place, self.tokenizer.digest, labels, 1)

    def shard(self, index: int) -> TokenShard:
        return TokenShard.open(self.path(index), self.tokenizer.digest).verify()


@pytest.fixture
def shop(tmp_path):
    shop = Shop(tmp_path)
    yield shop
    shop.team.close()
    shop.team.wait(20)


def until(ready, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_machine_is_shared_out():
    for cores in range(1, 300):
        for ranks in (1, 2, 4, 8):
            processes, threads = share(cores, ranks)
            assert 1 <= processes <= ahead.AHEAD
            assert processes * threads <= max(1, cores - ranks)


def test_shards_are_made_side_by_side_and_once(shop):
    shop.team.want([4, 2, 0])
    shop.team.want([4, 2, 0])
    shop.team.wait(60)
    assert sorted(shop.asked) == [2, 4], "no more at once than there are processes"
    shop.team.want([4, 2, 0])
    shop.team.wait(60)
    assert sorted(shop.asked) == [0, 2, 4]
    for index in (0, 2, 4):
        assert shop.shard(index).n_documents == 3
    assert shop.said == []


def test_a_shard_that_another_holds_is_left_to_it_and_looked_at_again(shop, monkeypatch):
    monkeypatch.setattr(ahead, "ELSEWHERE", 0.1)
    with locked(shop.path(1)):
        shop.team.want([1])
        shop.team.wait(10)
        assert shop.asked == []
    until(lambda: shop.team.want([1]) or shop.path(1).exists())
    assert shop.asked == [1]
    assert shop.said == []


def test_text_that_cannot_be_had_is_said_once_and_tried_again_later(shop, monkeypatch):
    monkeypatch.setattr(ahead, "AGAIN", 0.1)
    shop.refusal = UserError("shard 1 could not be fetched (500)", "wait")
    until(lambda: shop.team.want([1]) or len(shop.asked) == 3)
    shop.team.wait(10)
    assert shop.said == ["shard_1 is not made ahead of training (shard 1 could not be fetched (500): wait)"]
    shop.refusal = None
    until(lambda: shop.team.want([1]) or shop.path(1).exists())


def test_a_process_that_dies_is_noticed_and_left_no_half_shard(shop, monkeypatch):
    monkeypatch.setattr(shop, "texts", None)
    big = shop.folder / "text.parquet"
    pq.write_table(pa.table({"text": ["long text " * 100_000] * 200}), big, row_group_size=1)
    shop.team.want([1])
    until(lambda: shop.team._running)
    (process,) = shop.team._running
    os.kill(process.pid, signal.SIGKILL)
    shop.team.wait(20)
    assert len(shop.said) == 1
    assert "its process ended with -9" in shop.said[0]
    assert not shop.path(1).exists()
    shop.team.want([1])
    shop.team.wait(20)
    assert shop.asked == [1], "whoever needs it makes it now"
    with locked(shop.path(1), wait=False):
        pass


def test_closing_ends_the_processes_and_is_no_failure(shop):
    pq.write_table(pa.table({"text": ["long text " * 100_000] * 200}), shop.folder / "text.parquet", row_group_size=1)
    shop.team.want([0, 1])
    until(lambda: len(shop.team._running) == 2)
    running = [psutil.Process(process.pid) for process in shop.team._running]
    shop.team.close()
    shop.team.wait(20)
    assert not [process for process in running if process.is_running()]
    shop.team.want([2])
    assert (sorted(shop.asked), shop.said) == ([0, 1], [])


STARTER = """
import sys, threading
from pathlib import Path
from tests.data.test_ahead import Shop, until
shop = Shop(Path(sys.argv[1]))
import pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.table({"text": ["long text " * 100_000] * 300}), shop.folder / "text.parquet", row_group_size=1)
shop.team.want([0])
until(lambda: shop.team._running)
print(next(iter(shop.team._running)).pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_no_process_outlives_a_starter_that_was_killed(tmp_path, root):
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as starter:
        orphan = psutil.Process(int(starter.stdout.readline()))
        assert orphan.is_running()
        starter.send_signal(signal.SIGKILL)
    until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, 10)
    assert not (tmp_path / "shard_0.arrow").exists()


def test_a_job_is_done_in_this_process_too(shop, monkeypatch):
    """What a process of the team does, without the process."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(os, "nice", lambda more: None)
    ahead.main([json.dumps(shop.job(7))])
    shard = shop.shard(7)
    assert bytes(shard.flat[shard.offsets[1] : shard.offsets[2]].astype("uint8")).decode() == shop.texts[1]
