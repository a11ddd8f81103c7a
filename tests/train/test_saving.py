"""Saving while training goes on: one save at a time, the values of its start, whole or not there. C1 and C6."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.train import checkpoint, saving, writing
from nanolearn.train.checkpoint import FOLDER, Manifest, folder_name
from nanolearn.train.records import read
from nanolearn.train.saving import Saver, writers


def manifest(step):
    return Manifest(step=step, row=step * 8, tokens=step * 256, ranks=1, identity={}, watch={}, seconds={})


def tensors(value=0.0):
    names = ("model.w", "model.b", "optimizer.w.momentum")
    return {name: torch.full((8, 3), value) for name in names} | {"optimizer.w.step": torch.tensor(value)}


def stored(path, step):
    """What a checkpoint holds, read back into other memory."""
    into = tensors(-1.0)
    checkpoint.load(checkpoint.verify(path / FOLDER / folder_name(step)), into)
    return into


def holds(path, step, value):
    return all(bool((tensor == value).all()) for tensor in stored(path, step).values())


def save(saver, held, step):
    saver.start(held, manifest(step))
    return saver.wait()


@pytest.fixture
def gate(monkeypatch):
    """Saves don't begin to write before it is set."""
    event, write = threading.Event(), writing._write
    monkeypatch.setattr(writing, "_write", lambda *args: (event.wait(30), write(*args)))
    yield event
    event.set()


def test_training_goes_on_and_what_is_saved_is_what_was_there_at_the_start(tmp_path, gate):
    held = tensors(1.0)
    saver = Saver(tmp_path, held)
    saver.start(held, manifest(1))
    for tensor in held.values():
        tensor.add_(5.0)  # the next step, in place
    assert saver.poll() == []
    assert checkpoint.newest(tmp_path) is None
    gate.set()
    (saved,) = saver.wait()
    assert (saved.step, saved.refused) == (1, None)
    assert saved.found == checkpoint.newest(tmp_path)
    assert 0 <= saved.stall <= saved.seconds
    assert holds(tmp_path, 1, 1.0)
    assert saver.poll() == []  # told once


def test_a_run_trains_on_during_a_save_and_its_clock_counts_only_the_stall(tiny, tmp_path, monkeypatch):
    passed, waited, real = threading.Event(), [], saving.save
    monkeypatch.setattr(saving, "save", lambda *args: (waited.append(passed.wait(20)), real(*args))[1])

    def watch(record):
        if record["kind"] == "step" and record["step"] == 6:
            time.sleep(0.5)  # belongs to no activity
            passed.set()

    result = tiny.train(tmp_path / "run", save_every=4, observers=[watch])
    assert waited == [True, True, True]  # two steps were taken while step 4 was being saved
    saves = read(tmp_path / "run", "checkpoint")
    assert [record["step"] for record in saves] == [4, 8, 12]
    assert saves[0]["seconds"] > 0.5 > saves[0]["stall"]
    assert result.seconds["checkpoint"] >= sum(record["stall"] for record in saves)
    assert result.seconds["checkpoint"] < sum(record["seconds"] for record in saves) - 0.4


def test_the_wait_for_the_save_before_is_a_stall_and_neither_is_lost(tmp_path, gate):
    held = tensors(1.0)
    saver = Saver(tmp_path, held)
    saver.start(held, manifest(1))
    threading.Timer(0.3, gate.set).start()
    held["model.w"].fill_(2.0)
    saver.start(held, manifest(2))
    first, second = saver.wait()
    assert (first.step, second.step) == (1, 2)
    assert second.stall >= 0.2
    assert float(stored(tmp_path, 1)["model.w"][0, 0]) == 1.0
    assert float(stored(tmp_path, 2)["model.w"][0, 0]) == 2.0


def test_the_wait_at_the_end_is_a_stall(tmp_path, gate):
    saver = Saver(tmp_path, tensors())
    saver.start(tensors(), manifest(1))
    threading.Timer(0.3, gate.set).start()
    (saved,) = saver.wait()
    assert saved.stall >= 0.2


def test_the_hosts_buffers_are_made_once_and_are_not_the_tensors(tmp_path):
    held = tensors(1.0)
    saver = Saver(tmp_path, held)
    before = {name: tensor.data_ptr() for name, tensor in saver.host.items()}
    save(saver, held, 1)
    save(saver, held, 2)
    assert {name: tensor.data_ptr() for name, tensor in saver.host.items()} == before
    assert not {tensor.data_ptr() for tensor in held.values()} & set(before.values())


def test_parts_of_a_stack_are_saved_as_tensors_of_their_own(tmp_path):
    """Muon's state is one stack, named slice by slice: each slice is copied, not the whole stack behind it."""
    stack = torch.arange(24.0).view(2, 3, 4)
    held = {"optimizer.a": stack[0], "optimizer.b": stack[1].mT}
    saver = Saver(tmp_path, held)
    (saved,) = save(saver, held, 1)
    into = {"optimizer.a": torch.zeros(3, 4), "optimizer.b": torch.zeros(4, 3)}
    checkpoint.load(saved.found, into)
    assert torch.equal(into["optimizer.a"], stack[0]) and torch.equal(into["optimizer.b"], stack[1].T)
    assert saved.found.manifest.bytes < 24 * 4 + 1000


def test_c6_a_full_disk_in_the_thread_is_told_the_old_one_stays_and_the_next_is_saved(tmp_path, monkeypatch):
    saver = Saver(tmp_path, tensors())
    save(saver, tensors(1.0), 1)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_commit", refuse)
        (saved,) = save(saver, tensors(2.0), 2)
    assert saved.found is None
    assert str(saved.refused).startswith("the checkpoint of step 2 was not saved (No space left on device)")
    assert os.listdir(tmp_path / FOLDER) == [folder_name(1)]
    save(saver, tensors(3.0), 3)
    assert holds(tmp_path, 1, 1.0) and holds(tmp_path, 3, 3.0)


def test_what_is_no_fault_of_the_disk_is_raised_where_training_goes_on(tmp_path, monkeypatch):
    saver = Saver(tmp_path, tensors())

    def break_(*_):
        raise RuntimeError("the other ranks are gone")

    monkeypatch.setattr(saving, "save", break_)
    saver.start(tensors(), manifest(1))
    saver.close()  # on the way out it says nothing: something else was the reason
    with pytest.raises(RuntimeError, match="the other ranks are gone"):
        saver.poll()
    assert saver.wait() == []


def test_keep_every_keeps_its_steps_for_ever(tmp_path):
    saver = Saver(tmp_path, tensors(), keep_last=2, keep_every=20)
    for step in range(10, 80, 10):
        save(saver, tensors(step), step)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [folder_name(step) for step in (20, 40, 60, 70)]
    assert holds(tmp_path, 20, 20.0)


def test_c1_one_that_was_half_deleted_is_never_chosen_and_goes_with_the_next_save(tmp_path, monkeypatch):
    saver = Saver(tmp_path, tensors(), keep_last=1)
    save(saver, tensors(1.0), 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it were killed there
        save(saver, tensors(2.0), 2)
    assert [path.name for path in checkpoint.complete(tmp_path / FOLDER)] == [folder_name(2)]
    assert len(os.listdir(tmp_path / FOLDER)) == 2
    save(saver, tensors(3.0), 3)
    assert os.listdir(tmp_path / FOLDER) == [folder_name(3)]


CHILD = """
import sys, time, torch
from pathlib import Path
from nanolearn.train import checkpoint, saving, writing
from nanolearn.train.checkpoint import Manifest

run, how = Path(sys.argv[1]), sys.argv[2]

def manifest(step):
    return Manifest(step=step, row=0, tokens=0, ranks=1, identity={}, watch={}, seconds={})
"""

ENDING = (
    CHILD
    + """
write = writing._write
writing._write = lambda *args: (time.sleep(0.5), write(*args))
held = {"model.w": torch.ones(9)}
saver = saving.Saver(run, held)
saver.start(held, manifest(1))
if how == "raise":
    raise ValueError("something else went wrong")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "raise"])
def test_a_process_that_ends_finishes_its_save_first(tmp_path, how):
    child = subprocess.run([sys.executable, "-c", ENDING, tmp_path, how], capture_output=True, text=True, timeout=60)
    assert child.returncode == (how == "raise"), child.stderr
    assert checkpoint.load_weights(checkpoint.newest(tmp_path).path)["w"].eq(1.0).all()


KILLED = (
    CHILD
    + """
writing.FILE_BYTES = 1 << 20
held = {f"{kind}.{i}": torch.zeros(1 << 18) for kind in ("model", "optimizer") for i in range(4)}
found = checkpoint.resume_point(run)
step = found.manifest.step if found else 0
if found:
    checkpoint.load(found, held)
    assert all(bool((tensor == step).all()) for tensor in held.values()), step
saver = saving.Saver(run, held, keep_last=2, keep_every=7)
print("ready", flush=True)
while True:
    step += 1
    for tensor in held.values():
        tensor.fill_(step)  # while the save before is still in flight
    saver.poll()
    saver.start(held, manifest(step))
"""
)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_c1_killed_at_random_instants_of_saves_in_flight_what_is_newest_is_whole(tmp_path):
    """Each life loads what the one before left, checks that all of it is of one step, and goes on from there."""
    before = 0
    for wait in np.random.default_rng(0).uniform(0.1, 0.9, size=6):
        child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, ""], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = checkpoint.newest(tmp_path, pytest.fail)  # none that carries a manifest is damaged
        step = found.manifest.step if found else 0
        assert step >= before
        before = step
        for tensor in checkpoint.load_weights(found.path).values() if found else ():
            assert tensor.eq(step).all()
    assert before > 0


@given(st.lists(st.sets(st.sampled_from("abcdef")), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=6))
def test_each_tensor_is_written_once_by_a_rank_that_has_it_and_the_work_is_shared(names, sizes):
    size = dict(zip("abcdef", sizes, strict=False))
    held = [{name: size[name] for name in rank} for rank in names]
    found = writers(held)
    assert found.keys() == set().union(*names)
    assert all(name in held[rank] for name, rank in found.items())
    shared = writers([size] * len(held))
    loads = [sum(size[name] for name in shared if shared[name] == rank) for rank in range(len(held))]
    assert max(loads) <= sum(loads) / len(loads) + max(size.values())
