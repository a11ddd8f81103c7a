"""The process group: who I am among the ranks, and sums over all of them.

One process is the same code with a world of one: every function here then returns its argument and touches no
network. With more, torchrun has set RANK, LOCAL_RANK and WORLD_SIZE, and the group is always made (gloo on
CPUs, NCCL or RCCL beside it on GPUs), so that two processes can never be two models that do not know of each
other. Small sums of Python numbers go through gloo on the CPU in float64; gradients go through the device's
own backend.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from nanolearn.errors import UserError

# The others wait in a collective while rank 0 fetches and tokenises a corpus; torch's 10 to 30 minutes are too few.
PATIENCE = timedelta(hours=2)

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among its peers. Taught in chapter 14_scaling_out.

    >>> World().main, World(rank=3, size=8).main
    (True, False)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        return self.rank == 0


def from_environment() -> World:
    """The world that torchrun wrote into the environment; a world of one without torchrun.

    Raises UserError when only a part of it is set. Taught in chapter 14_scaling_out.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if not found:
        return World()
    if missing := [name for name in names if name not in found]:
        raise UserError(
            f"{', '.join(found)} is set but {', '.join(missing)} is not", "start several processes with torchrun"
        )
    return World(rank=int(found["RANK"]), size=int(found["WORLD_SIZE"]), local_rank=int(found["LOCAL_RANK"]))


def start(device_type: str = "cpu") -> World:
    """Join the process group if there is more than one process, and say who we are.

    device_type is torch.device.type ("cuda" also on ROCm). Raises UserError when the group can't be formed:
    going on would train several unrelated models.

    >>> start().size
    1

    Taught in chapter 14_scaling_out.
    """
    world = from_environment()
    if world.size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            said = str(error).splitlines()[0]
            message = f"{world.size} processes could not form a group ({said})"
            raise UserError(message, "start them with torchrun") from error
    return world


def stop() -> None:
    """Leave the process group, if there is one. Taught in chapter 14_scaling_out."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world() -> World:
    """Who we are, from the group that was started; a world of one if none was. Taught in chapter 14_scaling_out.

    >>> world()
    World(rank=0, size=1, local_rank=0)
    """
    if not dist.is_initialized():
        return World()
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)))


def all_reduce_sum(values: Iterable[float]) -> list[float]:
    """Each value summed over the ranks in float64, the same on every rank. Also serves as a barrier.

    >>> all_reduce_sum([1, 2.5])
    [1.0, 2.5]
    """
    total = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def reduce_sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks in place, on its own device, without waiting for the host.

    Taught in chapter 14_scaling_out.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(value: object, group: dist.ProcessGroup | None = None) -> list:
    """One (small) object of every rank, in rank order, on every rank. Taught in chapter 14_scaling_out.

    `group` is another group of all ranks, for a thread beside the one that trains.

    >>> gather({"files": 2})
    [{'files': 2}]
    """
    if not dist.is_initialized():
        return [value]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def on_main(work: Callable[[], T]) -> T:
    """Do something on rank 0 only; every rank gets its (small) value, or its UserError.

    >>> on_main(lambda: 3)
    3
    """
    if not dist.is_initialized():
        return work()
    value, refused = None, ""
    if world().main:
        try:
            value = work()
        except UserError as error:
            refused = str(error)
    value, refused = gather((value, refused))[0]
    if refused:
        raise UserError(refused)
    return value
