"""Checkpoints: atomic, verified, refused when they belong to something else. C1 to C6 of the list of known failures."""

import json
import os
import pickletools
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.train import checkpoint, writing
from nanolearn.train.checkpoint import FOLDER, MANIFEST, Manifest, NotSaved, folder_name

IDENTITY = {"recipe": "a" * 64, "tokenizer": "b" * 64, "data": "c" * 64}


def manifest(step):
    return Manifest(step=step, row=step * 8, tokens=step * 256, ranks=1, identity=IDENTITY, watch={}, seconds={})


def tensors(value=0.0):
    generator = torch.Generator().manual_seed(0)
    found = {
        "model.blocks.0.q.weight": torch.randn(8, 4, generator=generator),
        "model.scale": torch.randn(1, generator=generator),
        "optimizer.blocks.0.q.weight.momentum": torch.randn(8, 4, generator=generator, dtype=torch.float64),
        "optimizer.scale.step": torch.tensor(3.0),
        "optimizer.table.rows": torch.arange(5),
    }
    return {name: tensor + value if value else tensor for name, tensor in found.items()}


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def loaded(found):
    into = zeros()
    checkpoint.load(found, into)
    return into


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def test_round_trip_of_every_dtype_and_shape(tmp_path):
    writing.save(tmp_path, tensors(), manifest(6))
    found = checkpoint.newest(tmp_path)
    assert found.path == tmp_path / FOLDER / "step_00000006"
    assert found.manifest.row == 48
    assert equal(loaded(found), tensors())


def test_weights_alone_under_the_models_own_names(tmp_path):
    saved = writing.save(tmp_path, tensors(), manifest(6))
    weights = checkpoint.load_weights(saved.path)
    assert set(weights) == {"blocks.0.q.weight", "scale"}
    assert torch.equal(weights["scale"], tensors()["model.scale"])


def test_no_file_under_a_checkpoint_is_a_pickle(tmp_path):
    writing.save(tmp_path, tensors(), manifest(6))
    files = [path for path in (tmp_path / FOLDER).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        with pytest.raises(ValueError), path.open("rb") as file:
            list(pickletools.genops(file))
        assert not path.read_bytes().startswith(b"PK")  # torch.save writes a zip


def test_weights_and_optimizer_state_lie_in_different_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FILE_BYTES", 100)
    saved = writing.save(tmp_path, tensors(), manifest(6))
    assert len(saved.manifest.files) > 2
    assert equal(loaded(checkpoint.newest(tmp_path)), tensors())


def test_keep_last_deletes_older_ones_only(tmp_path):
    for step in (2, 4, 6):
        writing.save(tmp_path, tensors(step), manifest(step), keep_last=2)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [folder_name(4), folder_name(6)]


def test_c1_a_half_written_checkpoint_is_never_chosen(tmp_path):
    saved = writing.save(tmp_path, tensors(), manifest(4))
    half = saved.path.with_name(folder_name(8))
    shutil.copytree(saved.path, half)
    (half / MANIFEST).unlink()
    shutil.copytree(saved.path, saved.path.with_name(".writing-step_00000009"))
    assert checkpoint.newest(tmp_path).manifest.step == 4
    assert checkpoint.resume_point(tmp_path).manifest.step == 4  # and moves the half-written one out of the way
    writing.save(tmp_path, tensors(8.0), manifest(8))
    assert equal(loaded(checkpoint.newest(tmp_path)), tensors(8.0))
    assert sorted(os.listdir(tmp_path / FOLDER)) == [checkpoint.ASIDE, folder_name(4), folder_name(8)]


SAVER = """
import sys, torch
from nanolearn.train import checkpoint, writing
from nanolearn.train.checkpoint import Manifest

def save(step, tensors):
    empty = dict(row=0, tokens=0, ranks=1, identity={}, watch={}, seconds={})
    writing.save(sys.argv[1], tensors, Manifest(step=step, **empty))
"""

KILLED = (
    SAVER
    + """
writing.FILE_BYTES = 1 << 20
tensors = {f"model.{i}": torch.full((1 << 18,), float(i)) for i in range(8)}
print("ready", flush=True)
for step in range(1, 10_000):
    save(step, tensors)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.31, 0.55, 0.83])
def test_c1_killed_at_any_instant_the_newest_is_whole(tmp_path, wait):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(wait)
    child.send_signal(signal.SIGKILL)
    child.wait()
    found = checkpoint.newest(tmp_path)
    if found is not None:  # a slow disk may not have finished the first one
        assert checkpoint.load_weights(found.path)["7"].eq(7.0).all()


def test_c3_cursor_and_weights_are_one_unit(tmp_path):
    saved = writing.save(tmp_path, tensors(), manifest(6))
    stored = json.loads((saved.path / MANIFEST).read_text())
    assert (stored["step"], stored["row"], stored["tokens"]) == (6, 48, 1536)
    assert set(stored["files"]) == {path.name for path in saved.path.glob("*.safetensors")}


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_c4_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, harm):
    writing.save(tmp_path, tensors(), manifest(4))
    newest = writing.save(tmp_path, tensors(1.0), manifest(8)).path
    shard = sorted(newest.glob("*.safetensors"))[0]
    if harm == "flip":
        flip_a_byte(shard)
    elif harm == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
    elif harm == "remove":
        shard.unlink()
    else:
        (newest / MANIFEST).write_text("{")
    said = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found.manifest.step == 4
    assert equal(loaded(found), tensors())
    assert len(said) == 1
    assert "step_00000008 is damaged" in said[0]


def test_c4_going_on_after_damage_sets_it_aside_and_the_step_can_be_saved_again(tmp_path):
    writing.save(tmp_path, tensors(), manifest(4))
    flip_a_byte(next(writing.save(tmp_path, tensors(1.0), manifest(8)).path.glob("*.safetensors")))
    assert checkpoint.resume_point(tmp_path, lambda text: None).manifest.step == 4
    assert len(list((tmp_path / FOLDER / checkpoint.ASIDE).glob("step_00000008.*/manifest.json"))) == 1
    writing.save(tmp_path, tensors(2.0), manifest(6))
    writing.save(tmp_path, tensors(3.0), manifest(8))
    assert equal(loaded(checkpoint.newest(tmp_path)), tensors(3.0))


def test_a_folder_of_a_persons_own_is_left_alone(tmp_path):
    writing.save(tmp_path, tensors(), manifest(4))
    shutil.copytree(tmp_path / FOLDER / folder_name(4), tmp_path / FOLDER / "step_old")
    assert checkpoint.resume_point(tmp_path).manifest.step == 4
    assert checkpoint.newest(tmp_path).path.name == folder_name(4)
    assert (tmp_path / FOLDER / "step_old" / MANIFEST).exists()


def test_resuming_from_a_chosen_step_gives_up_the_later_ones(tmp_path):
    for step in (2, 4, 6):
        writing.save(tmp_path, tensors(step), manifest(step), keep_last=3)
    assert checkpoint.resume_point(tmp_path, step=4).manifest.step == 4
    assert checkpoint.newest(tmp_path).manifest.step == 4
    with pytest.raises(UserError, match="there is no checkpoint .*step_00000006"):
        checkpoint.resume_point(tmp_path, step=6)


def test_c4_when_all_are_damaged_a_person_decides(tmp_path):
    flip_a_byte(next(writing.save(tmp_path, tensors(), manifest(4)).path.glob("*.safetensors")))
    with pytest.raises(UserError, match="move that folder away"):
        checkpoint.newest(tmp_path, lambda text: None)


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_c5_another_recipe_tokenizer_or_corpus_is_refused_by_name(tmp_path, name):
    found = writing.save(tmp_path, tensors(), manifest(4))
    saved = found.manifest.identity
    checkpoint.check_identity(found.path, saved, IDENTITY)
    with pytest.raises(UserError, match=f"another {name} \\({IDENTITY[name][:12]}, now dddddddddddd\\)"):
        checkpoint.check_identity(found.path, saved, {**IDENTITY, name: "d" * 64})


def test_another_set_of_tensors_is_refused(tmp_path):
    found = writing.save(tmp_path, tensors(), manifest(4))
    with pytest.raises(UserError, match="other tensors"):
        checkpoint.load(found, {**zeros(), "model.new": torch.zeros(1)})


FULL = (
    SAVER
    + """
import resource
tensors = {"model.w": torch.zeros(4096)}
save(1, tensors)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # the kernel refuses longer files
try:
    save(2, tensors)
except checkpoint.NotSaved as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
save(3, tensors)
"""
)


@pytest.mark.skipif(os.name == "nt", reason="file size limits are a Unix thing")
def test_c6_a_disk_that_refuses_leaves_the_old_checkpoint_and_the_next_save_works(tmp_path):
    child = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("the checkpoint of step 2 was not saved (")
    assert child.stdout.strip().endswith("make room on the disk")
    assert sorted(os.listdir(tmp_path / FOLDER)) == [folder_name(1), folder_name(3)]


def test_c6_a_failure_before_the_rename_leaves_nothing_behind(tmp_path, monkeypatch):
    writing.save(tmp_path, tensors(), manifest(4))

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_commit", refuse)
    with pytest.raises(NotSaved, match="No space left on device"):
        writing.save(tmp_path, tensors(), manifest(8))
    assert os.listdir(tmp_path / FOLDER) == [folder_name(4)]


def test_nothing_to_resume_from(tmp_path):
    assert checkpoint.newest(Path(tmp_path)) is None
