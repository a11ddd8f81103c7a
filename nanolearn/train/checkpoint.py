"""Checkpoints: one atomic unit of weights, optimizer state, cursor and the watch's memory.

A checkpoint is written beside its final place, read back and hashed, given its manifest last, synced, and
renamed: a kill at any instant leaves the ones before as they were, and a folder without a manifest is never
chosen. Tensors go through torch.distributed.checkpoint in its safetensors storage, each rank writing what it
owns, so that any number of ranks can read them; its default storage is not used because it keeps a pickle,
and a pickle can run code. Random streams are stateless (nanolearn.rng), so no generator state is saved.
"""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nanolearn import distributed
from nanolearn.errors import UserError
from nanolearn.fetch import sha256, sync

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
ASIDE, STEPS = "set_aside", f"step_{8 * '[0-9]'}"  # any other folder is a person's own, and left alone
MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of the names under which tensors are stored
FILE_BYTES = 512 << 20  # the writer serialises one file at a time in memory: this bounds what a save costs

T = TypeVar("T")

# One process without a group is what we mean, and torch warns about it at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class NotSaved(UserError):
    """A save that failed (a full disk, most often); what was on disk before is still there."""


class FileEntry(BaseModel):
    """One file of a checkpoint. Taught in chapter 07_pretrain."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint is: written last, so that its presence means that everything else is there.

    `identity` holds the digests that must agree on resume (recipe, tokenizer, data); `row` is the next global
    row; `watch` the memory of nanolearn.train.watch; `seconds` where the time of the run went so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = 1
    step: int
    row: int
    tokens: int
    ranks: int
    identity: dict[str, str]
    watch: dict
    seconds: dict[str, float]
    files: dict[str, FileEntry] = {}

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified, and where it lies. Taught in chapter 07_pretrain."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: Path) -> "Found":
        return cls(path, Manifest.model_validate_json((path / MANIFEST).read_text(encoding="utf-8")))


def folder_name(step: int) -> str:
    """Where a step lies; names sort as steps do. Taught in chapter 07_pretrain.

    >>> folder_name(500)
    'step_00000500'
    """
    return f"step_{step:08d}"


def _sync_folder(path: Path) -> None:
    if os.name != "nt":  # Windows has no handle on a folder; NTFS journals the rename itself
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which file each tensor goes to: in order, weights never in one file with optimizer state."""
    numbers: dict[str, int] = {}
    number, room, before = 0, 0, ""
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        kind = name.split(".", 1)[0]
        if size > room or kind != before:
            number, room, before = number + 1, FILE_BYTES, kind
        numbers[name] = number
        room -= size
    return numbers


def _why(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_why(inner)}"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


def _agree(step: int, work: Callable[[], T]) -> T:
    """Do one part of a save on every rank; what fails on one rank fails on all, so that none waits for another."""
    result, said = [], ""
    try:
        result.append(work())
    except (OSError, CheckpointException) as error:
        said = _why(error)
    if failures := [failure for failure in distributed.gather(said) if failure]:
        raise NotSaved(f"the checkpoint of step {step} was not saved ({failures[0]})", "make room on the disk")
    return result[0]


def _prepare(aside: Path) -> None:
    for left in aside.parent.glob(".writing-*"):
        shutil.rmtree(left)
    aside.mkdir(parents=True)


def _write(aside: Path, tensors: Mapping[str, Tensor]) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(aside), _file_numbers(tensors), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=distributed.world().size == 1)


def _entries(aside: Path) -> dict[str, FileEntry]:
    """The files that this rank wrote, hashed from what a read gives back."""
    mine = sorted(aside.glob(f"shard-{distributed.world().rank + 1:05d}-*.safetensors"))
    return {path.name: FileEntry(bytes=path.stat().st_size, sha256=sha256(path)) for path in mine}


def _commit(aside: Path, final: Path, manifest: Manifest) -> None:
    (aside / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    sync(aside / MANIFEST)
    _sync_folder(aside)
    aside.rename(final)
    _sync_folder(final.parent)


def save(run_dir: Path, tensors: Mapping[str, Tensor], manifest: Manifest, keep_last: int = 2) -> Found:
    """Write one checkpoint and delete all but the newest `keep_last`; every rank calls it.

    `tensors` are flat, named MODEL + parameter name and OPTIMIZER + parameter name + slot. Raises NotSaved
    when the disk refuses; the checkpoints before are untouched and the run may go on.

    Taught in chapter 07_pretrain.
    """
    folder, step = Path(run_dir) / FOLDER, manifest.step
    final = folder / folder_name(step)
    aside = folder / f".writing-{final.name}"
    main = distributed.world().main
    try:
        _agree(step, lambda: _prepare(aside) if main else None)
        _agree(step, lambda: _write(aside, tensors))
        parts = distributed.gather(_agree(step, lambda: _entries(aside)))
        files = {name: entry for part in parts for name, entry in part.items()}
        manifest = manifest.model_copy(update={"files": files})
        _agree(step, lambda: _commit(aside, final, manifest) if main else None)
    except NotSaved:
        if main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in _steps(folder)[max(keep_last, 1) :] if main else ():
        shutil.rmtree(old, ignore_errors=True)
    return Found(final, manifest)


def _steps(folder: Path) -> list[Path]:
    """Folders that carry a manifest, newest first."""
    return sorted((path.parent for path in folder.glob(f"{STEPS}/{MANIFEST}")), reverse=True)


def _damage(found: Found) -> str:
    for name, entry in found.manifest.files.items():
        file = found.path / name
        size = file.stat().st_size if file.is_file() else 0
        if size != entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
        if sha256(file) != entry.sha256:
            return f"{name} does not have the checksum it was saved with"
    return "" if found.manifest.files else "its manifest names no files"


def verify(path: Path) -> Found:
    """Read and check one checkpoint. Raises UserError naming the first damage found. Taught in chapter 07_pretrain."""
    try:
        found = Found.read(path)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}", "list the folder above it") from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"checkpoint {path.name} is damaged (its manifest: {str(error).splitlines()[0]})") from None
    if damage := _damage(found):
        raise UserError(f"checkpoint {path.name} is damaged ({damage})")
    return found


def check_identity(where: Path, theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raises UserError naming what differs (recipe, tokenizer, data) between what lies at `where` and this run.

    >>> check_identity(Path("runs/a"), {"recipe": "1a2b"}, {"recipe": "3c4d"})
    Traceback (most recent call last):
    nanolearn.errors.UserError: runs/a has another recipe (1a2b, now 3c4d): go back to it, or give another run_dir
    """
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            was, now = (str(digest)[:12] for digest in (theirs.get(name), mine.get(name)))
            raise UserError(f"{where} has another {name} ({was}, now {now})", "go back to it, or give another run_dir")


def newest(run_dir: Path, say: Callable[[str], None] = print) -> Found | None:
    """The newest checkpoint that is whole, None if there is none yet; damaged ones are passed over, and said.

    Reads every byte of it once (about 1 s per 2 GB). Raises UserError when all are damaged: starting again
    from step 0 is for a person to decide. Taught in chapter 07_pretrain.
    """
    folder = Path(run_dir) / FOLDER
    for path in _steps(folder):
        try:
            return verify(path)
        except UserError as error:
            say(f"{error}; trying the one before it")
    if _steps(folder):
        raise UserError(f"every checkpoint in {folder} is damaged", "move that folder away to start from step 0")
    return None


def _set_aside(folder: Path, step: int) -> None:
    # Damaged ones, half-written ones, those of a future that is given up: no later resume may take them up.
    for path in folder.glob(STEPS):
        if int(path.name.removeprefix("step_")) > step:
            place = folder / ASIDE / f"{path.name}.{time.time_ns()}"
            place.parent.mkdir(exist_ok=True)
            path.rename(place)


def resume_point(run_dir: Path, say: Callable[[str], None] = print, step: int = -1) -> Found | None:
    """Where to go on: the checkpoint of `step`, or the newest whole one (-1), or None for a start; all ranks agree.

    Every rank calls it. Checkpoints of later steps are moved to `checkpoints/set_aside/`. Raises UserError on
    every rank when the wanted one is damaged or missing. Taught in chapter 07_pretrain.
    """
    folder = Path(run_dir) / FOLDER

    def choose() -> int:
        found = newest(run_dir, say) if step < 0 else verify(folder / folder_name(step))
        _set_aside(folder, found.manifest.step if found else -1)
        return found.manifest.step if found else -1

    step = distributed.on_main(choose)
    return None if step < 0 else Found.read(folder / folder_name(step))


def _stored(path: Path) -> Mapping:
    return dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata


def _fill(path: Path, tensors: dict[str, Tensor], alone: bool) -> None:
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=alone)


def load(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place from a checkpoint, whatever number of ranks wrote it; every rank calls it.

    Raises UserError when the names differ (another version of the package wrote it). Taught in chapter 07_pretrain.
    """
    if difference := set(_stored(found.path)) ^ set(tensors):
        raise UserError(f"{found.path} holds other tensors than this model needs, such as {min(difference)}")
    _fill(found.path, dict(tensors), alone=distributed.world().size == 1)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint on the CPU under the model's own parameter names, ready for `load_state_dict`."""
    stored = {name: entry for name, entry in _stored(path).items() if name.startswith(MODEL)}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    _fill(path, weights, alone=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in weights.items()}
