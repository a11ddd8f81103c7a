"""Saving while training goes on: training stops only while the tensors are copied to the host's memory.

A thread then writes the copy. It talks to the other ranks through a process group of its own: two threads in one
group would take each other's messages.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nanolearn import distributed
from nanolearn.train.checkpoint import Found, Manifest, NotSaved
from nanolearn.train.writing import Group, local, save, sizes


def writers(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Which rank writes each tensor that several hold alike: the one with least to write so far.

    >>> writers([{"a": 8, "b": 4, "mine": 4}, {"a": 8, "b": 4}])
    {'a': 0, 'b': 1, 'mine': 0}

    Taught in chapter 14_scaling_out.
    """
    loads, found = [0] * len(held), {}
    sizes = {name: size for rank in held for name, size in rank.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = [rank for rank, names in enumerate(held) if name in names]
        found[name] = min(holders, key=loads.__getitem__)
        loads[found[name]] += sizes[name]
    return found


@dataclass(frozen=True)
class Saved:
    """How a save ended: `found` on the disk, or not, for the reason in `refused`.

    `seconds` is from its start to its end, `stall` the part of them in which training stood still. Taught in chapter
    07_pretrain.
    """

    step: int
    found: Found | None
    refused: NotSaved | None
    seconds: float
    stall: float


class Saver:
    """Saves one checkpoint at a time in a thread; every rank makes one, from the tensors that it will save.

    The host's buffers are made here, once, as large as what this rank writes (pinned where a tensor is on a GPU). A
    process that ends before `wait` still finishes the save. Taught in chapter 07_pretrain.

    >>> import tempfile
    >>> weights = {"model.w": torch.zeros(2)}
    >>> saver = Saver(Path(tempfile.mkdtemp()), weights)
    >>> saver.start(weights, Manifest(step=1, row=8, tokens=64, ranks=1, identity={}, watch={}, seconds={}))
    >>> [saved.found.path.name for saved in saver.wait()]
    ['step_00000001']
    """

    def __init__(self, run_dir: Path, tensors: Mapping[str, Tensor], keep_last: int = 2, keep_every: int = 0) -> None:
        self.run_dir, self.keep_last, self.keep_every = run_dir, keep_last, keep_every
        self.thread: threading.Thread | None = None
        self.ended: SimpleQueue[Saved | BaseException] = SimpleQueue()
        world = distributed.world()
        self.group: Group = None
        if world.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=distributed.PATIENCE)
            self.mesh = init_device_mesh("cpu", (world.size,))
        whole = sizes({name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)})
        writer = writers(distributed.gather(whole))
        self.host = {name: self._room(t) for name, t in tensors.items() if writer.get(name, world.rank) == world.rank}

    def _room(self, tensor: Tensor) -> Tensor:
        own = local(tensor)
        room = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        if not isinstance(tensor, DTensor):
            return room
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(room, self.mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    def start(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Copy the tensors and begin to save them; waits for a save that is still in flight. Every rank calls it."""
        begun = time.perf_counter()
        self._join()
        for name, room in self.host.items():
            local(room).copy_(local(tensors[name]), non_blocking=tensors[name].is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies are done before a step changes the tensors
        stall = time.perf_counter() - begun
        self.thread = threading.Thread(target=self._save, args=(manifest, begun, stall), name="saving")
        self.thread.start()

    def _save(self, manifest: Manifest, begun: float, stall: float) -> None:
        found, refused = None, None
        try:
            found = save(self.run_dir, self.host, manifest, self.keep_last, self.keep_every, self.group)
        except NotSaved as error:
            refused = error
        except BaseException as error:  # raised in the thread that trains, by `poll`
            self.ended.put(error)
            return
        self.ended.put(Saved(manifest.step, found, refused, time.perf_counter() - begun, stall))

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call, without waiting; raises what went wrong apart from the disk."""
        ended = []
        while not self.ended.empty():
            one = self.ended.get()
            if isinstance(one, BaseException):
                raise one
            ended.append(one)
        return ended

    def wait(self) -> list[Saved]:
        """Wait for the save in flight, then as `poll`; the wait counts as a stall of the last one."""
        begun = time.perf_counter()
        self._join()
        waited = time.perf_counter() - begun
        ended = self.poll()
        return [*ended[:-1], *(replace(last, stall=last.stall + waited) for last in ended[-1:])]

    def close(self) -> None:
        """Let the save in flight end, after whatever happened, and say nothing: for the way out of a run."""
        self._join()
