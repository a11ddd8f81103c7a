"""Checkpoints: one atomic unit of weights, optimizer state, cursor and the watch's memory; choosing and reading them.

The manifest is written last (nanolearn.train.saving), so a folder without one is never chosen; every file is read and
compared with its checksum before it is trusted. Tensors lie in the safetensors storage of
torch.distributed.checkpoint, in pieces with their place in the whole, so that any number of ranks can read them; its
default storage is not used because it keeps a pickle, and a pickle can run code. Random streams are stateless
(nanolearn.rng), so no generator state is saved.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from nanolearn import distributed
from nanolearn.errors import UserError
from nanolearn.fetch import sha256

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
ASIDE, STEPS = "set_aside", f"step_{8 * '[0-9]'}"  # any other folder is a person's own, and left alone
MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of the names under which tensors are stored

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


def complete(folder: Path) -> list[Path]:
    """Checkpoints that carry a manifest, newest first. Taught in chapter 07_pretrain."""
    return sorted((path.parent for path in folder.glob(f"{STEPS}/{MANIFEST}")), reverse=True)


def _damage(found: Found, names: list[str]) -> str:
    for name in names:
        entry, file = found.manifest.files[name], found.path / name
        try:
            size = file.stat().st_size if file.is_file() else 0
            if size != entry.bytes:
                return f"{name} has {size} bytes instead of {entry.bytes}"
            if sha256(file) != entry.sha256:
                return f"{name} does not have the checksum it was saved with"
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
    return "" if found.manifest.files else "its manifest names no files"


def _examine(path: Path) -> Found | str:
    """A checkpoint of which this rank's share of the files is whole, else what is wrong with it."""
    try:
        found = Found.read(path)
    except FileNotFoundError:
        return f"there is no checkpoint {path}"
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        return f"checkpoint {path.name} is damaged (its manifest: {str(error).splitlines()[0]})"
    world = distributed.world()
    damage = _damage(found, sorted(found.manifest.files)[world.rank :: world.size])
    return f"checkpoint {path.name} is damaged ({damage})" if damage else found


def verify(path: Path) -> Found:
    """Read and check one checkpoint; each rank reads a share of the files, and all come to one answer.

    Raises UserError naming the first damage found, on every rank. Taught in chapter 07_pretrain.
    """
    found = _examine(path)
    for said in distributed.gather(found if isinstance(found, str) else ""):
        if said:
            raise UserError(said)
    assert isinstance(found, Found)
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

    Every rank calls it. Reads every byte once (about 1 s per 2 GB on one rank). Raises UserError when all are damaged:
    starting again from step 0 is for a person to decide. Taught in chapter 07_pretrain.
    """
    folder = Path(run_dir) / FOLDER
    paths = distributed.on_main(lambda: complete(folder))
    for path in paths:
        try:
            return verify(path)
        except UserError as error:
            if distributed.world().main:
                say(f"{error}; trying the one before it")
    if paths:
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
    found = newest(run_dir, say) if step < 0 else verify(folder / folder_name(step))
    distributed.on_main(lambda: _set_aside(folder, found.manifest.step if found else -1))
    return found


def _stored(path: Path) -> Mapping:
    return dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata


def _fill(path: Path, tensors: dict[str, Tensor], alone: bool) -> None:
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=alone)


def load(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place from a checkpoint, whatever number of ranks wrote it; every rank calls it.

    A rank names what it holds: plain tensors are filled whole, DTensors (rows of a table) with their own rows.
    Raises UserError when the names of all ranks together are not the stored ones (another version of the package
    wrote it). Taught in chapter 07_pretrain.
    """
    wanted = set().union(*distributed.gather(set(tensors)))
    if difference := set(_stored(found.path)) ^ wanted:
        raise UserError(f"{found.path} holds other tensors than this model needs, such as {min(difference)}")
    _fill(found.path, dict(tensors), alone=distributed.world().size == 1)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint on the CPU under the model's own parameter names, ready for `load_state_dict`."""
    stored = {name: entry for name, entry in _stored(path).items() if name.startswith(MODEL)}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    _fill(path, weights, alone=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in weights.items()}
