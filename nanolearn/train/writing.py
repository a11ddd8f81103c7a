"""How a checkpoint gets onto the disk: beside its final place, every rank its part, whole or not there at all.

The files are written, read back and hashed; the manifest is added when every rank has reported; all is synced, then
renamed. A kill at any instant leaves the checkpoints before as they were, and a failure on one rank is one on all.
"""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from nanolearn import distributed
from nanolearn.fetch import sha256, sync
from nanolearn.train.checkpoint import FOLDER, MANIFEST, FileEntry, Found, Manifest, NotSaved, complete, folder_name

FILE_BYTES = 512 << 20  # so many at most, where no tensor is larger
ASIDE = ".writing-"  # what is half there, being written or being deleted; the next save removes it

Group = dist.ProcessGroup | None
T = TypeVar("T")


def _sync_folder(path: Path) -> None:
    if os.name != "nt":  # Windows has no handle on a folder; NTFS journals the rename itself
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank: its rows of a DTensor, else all of it. Taught in chapter 14_scaling_out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes on this rank by name. Taught in chapter 14_scaling_out."""
    return {name: local(tensor).nbytes for name, tensor in tensors.items()}


def file_numbers(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Which file each tensor goes to, alike on every rank; `held` is each rank's bytes by name.

    In order, no rank's file larger than FILE_BYTES unless one tensor is, weights never with optimizer state.

    >>> file_numbers([{"model.w": 600 << 20, "optimizer.w.momentum": 8}, {"model.b": 4, "model.w": 600 << 20}])
    {'model.b': 1, 'model.w': 2, 'optimizer.w.momentum': 3}

    Taught in chapter 07_pretrain.
    """
    numbers: dict[str, int] = {}
    number, rooms, before = 0, [0] * len(held), ""
    for name in sorted(set().union(*held)):
        kind = name.split(".", 1)[0]
        if kind != before or any(rank.get(name, 0) > room for rank, room in zip(held, rooms, strict=True)):
            number, rooms, before = number + 1, [FILE_BYTES] * len(held), kind
        numbers[name] = number
        rooms = [room - rank.get(name, 0) for rank, room in zip(held, rooms, strict=True)]
    return numbers


def _why(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_why(inner)}"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


def _agree(step: int, group: Group, work: Callable[[], T]) -> T:
    """Do one part of a save on every rank; what fails on one rank fails on all, so that none waits for another."""
    result, said = [], ""
    try:
        result.append(work())
    except (Exception, CheckpointException) as error:  # whatever it is: a rank that left here would be waited for
        said = _why(error)
    for failure in distributed.gather(said, group):
        if failure:
            raise NotSaved(f"the checkpoint of step {step} was not saved ({failure})", "make room on the disk")
    return result[0]


def _prepare(aside: Path) -> None:
    for left in aside.parent.glob(f"{ASIDE}*"):
        shutil.rmtree(left)
    aside.mkdir(parents=True)


def _shard() -> str:
    return f"shard-{distributed.world().rank + 1:05d}"


class Writer(dcp.HuggingFaceStorageWriter):
    """Torch's safetensors writer, but a file goes to the disk straight from the tensors.

    Torch's own makes two copies of each file in memory first, and no other thread can run Python while it does. The
    names and the format are the same, so torch's reader reads them. Taught in chapter 07_pretrain.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, each with its tensors' places in the whole. Raises SafetensorError, OSError."""
        numbers = self.fqn_to_index_mapping or {}
        files: dict[int, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            files[numbers[item.index.fqn]].append(item)
        for number, items in files.items():
            tensors, places = {}, {}
            for item in items:
                tensor, name = planner.resolve_data(item), item.index.fqn
                assert isinstance(tensor, Tensor) and item.tensor_data is not None
                tensors[name] = tensor.detach().cpu().contiguous()
                places[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
            path = Path(self.path) / f"{_shard()}-model-{number:05d}-of-{max(numbers.values()):05d}.safetensors"
            save_file(tensors, path, {CUSTOM_METADATA_KEY: json.dumps(places), "format": "pt"})
            sync(path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # what was written where is in the files
        return done


def _write(aside: Path, tensors: Mapping[str, Tensor], numbers: dict[str, int], group: Group) -> None:
    alone = distributed.world().size == 1
    writer = Writer(str(aside), numbers, save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)


def _entries(aside: Path) -> dict[str, FileEntry]:
    """The files that this rank wrote, hashed from what a read gives back."""
    mine = sorted(aside.glob(f"{_shard()}-*.safetensors"))
    return {path.name: FileEntry(bytes=path.stat().st_size, sha256=sha256(path)) for path in mine}


def _commit(aside: Path, final: Path, manifest: Manifest) -> None:
    (aside / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    sync(aside / MANIFEST)
    _sync_folder(aside)
    aside.rename(final)
    _sync_folder(final.parent)


def _forget(folder: Path, keep_last: int, keep_every: int) -> None:
    for old in complete(folder)[max(keep_last, 1) :]:
        if keep_every and int(old.name.removeprefix("step_")) % keep_every == 0:
            continue
        half = old.with_name(f"{ASIDE}{old.name}")
        with suppress(OSError):  # the new one is complete all the same; the next save tries again
            old.rename(half)  # first: a kill in the middle must not leave a checkpoint that looks whole
            shutil.rmtree(half)


def save(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    keep_last: int = 2,
    keep_every: int = 0,
    group: Group = None,
) -> Found:
    """Write one checkpoint and wait for it; then delete all but the newest `keep_last` and each `keep_every`-th step.

    Every rank calls it, with what it holds: plain tensors (the same on each rank that names them) and DTensors. They
    are flat, named MODEL + parameter name and OPTIMIZER + parameter name + slot. `group` is a gloo group of all ranks.
    Raises NotSaved on every rank when a disk refuses; the checkpoints before are untouched and the run may go on.

    Taught in chapter 07_pretrain.
    """
    folder, step = Path(run_dir) / FOLDER, manifest.step
    final = folder / folder_name(step)
    aside = folder / f"{ASIDE}{final.name}"
    main = distributed.world().main
    numbers = file_numbers(distributed.gather(sizes(tensors), group))
    try:
        _agree(step, group, lambda: _prepare(aside) if main else None)
        _agree(step, group, lambda: _write(aside, tensors, numbers, group))
        parts = distributed.gather(_agree(step, group, lambda: _entries(aside)), group)
        files = {name: entry for part in parts for name, entry in part.items()}
        manifest = manifest.model_copy(update={"files": files})
        _agree(step, group, lambda: _commit(aside, final, manifest) if main else None)
    except NotSaved:
        if main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if main:
        _forget(folder, keep_last, keep_every)
    return Found(final, manifest)
