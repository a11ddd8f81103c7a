"""One rank of test_checkpoint_ranks.py: `save`, `go_on` (load, compare, save again), `refuse`, `lonely`."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nanolearn import distributed
from nanolearn.errors import UserError
from nanolearn.train import checkpoint, writing
from nanolearn.train.checkpoint import Manifest
from nanolearn.train.saving import Saver
from nanolearn.train.writing import local

TABLES = {"model.table": 5, "optimizer.table.exp_avg": 5, "optimizer.head.exp_avg": 1, "optimizer.big.exp_avg": 8}
REPLICATED = {"model.w": (4, 3), "model.b": (7,), "optimizer.b.step": ()}
OWNED = [f"optimizer.blocks.{i}.momentum" for i in range(3)]


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def made(world, zero: bool = False) -> dict[str, torch.Tensor]:
    """What this rank holds: some tensors as all do, some alone, its rows of others (5 rows on 4 ranks: 2, 2, 1, 0)."""
    mesh = init_device_mesh("cpu", (world.size,)) if world.size > 1 else None
    found = {name: whole(name, shape) for name, shape in REPLICATED.items()}
    for number, name in enumerate(OWNED):
        if number % world.size == world.rank:
            found[name] = whole(name, (3, 3))
    for name, rows in TABLES.items():
        table = whole(name, (rows, 3))
        each = -(-rows // world.size)
        mine = table[world.rank * each : (world.rank + 1) * each].clone()
        if mesh is None:
            found[name] = table
        else:
            shape = {"shape": table.shape, "stride": table.stride()}
            found[name] = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, **shape)
    if zero:
        for tensor in found.values():
            local(tensor).zero_()
    return found


def manifest(step: int, world) -> Manifest:
    return Manifest(step=step, row=0, tokens=0, ranks=world.size, identity={}, watch={}, seconds={})


def save(run: Path, step: int, world) -> None:
    held = made(world)
    saver = Saver(run, held)
    saver.start(held, manifest(step, world))
    for tensor in held.values():
        local(tensor).add_(1.0)  # and a collective of the group that trains, while the other one is at work
    for _ in range(20):
        distributed.all_reduce_sum([1.0])
    (saved,) = saver.wait()
    assert saved.found is not None, saved.refused
    print(sum(local(tensor).nbytes for tensor in saver.host.values()))


def go_on(run: Path, step: int, world) -> None:
    found = checkpoint.resume_point(run)
    assert found is not None and found.manifest.step == step - 1
    held = made(world, zero=True)
    checkpoint.load(found, held)
    for name, tensor in made(world).items():
        assert torch.equal(local(held[name]), local(tensor)), name
    save(run, step, world)


def refused(saver: Saver, held, step: int, world) -> str:
    saver.start(held, manifest(step, world))
    (saved,) = saver.wait()
    return str(saved.refused or "")


def refuse(run: Path, step: int, world) -> None:
    """One rank fails at each part of a save: all are told the same, nobody waits, the next save is whole."""
    held = made(world)
    saver = Saver(run, held, keep_last=9)
    assert refused(saver, held, 1, world) == ""
    full, odd = OSError(28, "No space left on device"), ValueError("a bug")
    writer = writing.Writer
    parts = [(writer, "write_data", 1, full), (writing, "_entries", 1, odd), (writing, "_commit", 0, full)]
    for place, part, rank, error in [*parts, (writing, "_prepare", 0, odd)]:
        real = getattr(place, part)

        def fail(*_, error=error):
            raise error

        if world.rank == rank:
            setattr(place, part, fail)
        said = distributed.gather(refused(saver, held, 2, world))
        setattr(place, part, real)
        assert said[0] == said[1] and (error.strerror if error is full else str(error)) in said[0], said
    assert refused(saver, held, 3, world) == ""
    assert distributed.on_main(lambda: sorted(os.listdir(run / "checkpoints"))) == ["step_00000001", "step_00000003"]
    damaged(run, held, world)


def damaged(run: Path, held, world) -> None:
    """Each rank reads its share of the files; what one of them finds, all know, and all take the one before."""
    path = run / "checkpoints" / "step_00000003"
    for file in sorted(path.glob("*.safetensors")):
        good = file.read_bytes()
        distributed.gather(None)
        if world.main:
            file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        distributed.gather(None)
        said: list[str] = []
        found = checkpoint.newest(run, said.append)
        assert found is not None and found.manifest.step == 1
        assert len(said) == world.main
        assert all(file.name in text for text in said)
        distributed.gather(None)
        if world.main:
            file.write_bytes(good)
        distributed.gather(None)
    assert checkpoint.verify(path).manifest.step == 3
    with pytest.raises(UserError, match="optimizer.extra.0"):  # of one rank only, and all refuse
        checkpoint.load(checkpoint.verify(path), held | ({"optimizer.extra.0": torch.zeros(1)} if world.main else {}))


def lonely(run: Path, step: int, world) -> None:
    """Rank 1 dies before its part of a save: rank 0's thread ends with an error, and its exit does not hang."""
    held = made(world)
    saver = Saver(run, held)
    saver.start(held, manifest(1, world))
    saver.wait()
    if world.rank == 1:
        os._exit(0)
    saver.start(held, manifest(2, world))
    begun = time.perf_counter()
    saver.close()
    print(time.perf_counter() - begun)
    try:
        saver.poll()
    except RuntimeError:
        print("raised")


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = distributed.start("cpu")
    {"save": save, "go_on": go_on, "refuse": refuse, "lonely": lonely}[sys.argv[1]](
        Path(sys.argv[2]), int(sys.argv[3]), here
    )
    if sys.argv[1] != "lonely":
        distributed.stop()
        assert not dist.is_initialized()
