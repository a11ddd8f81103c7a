"""Execution: how a recipe is run, never what it learns. It may change from one resume to the next."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from nanolearn.errors import UserError
from nanolearn.hardware import DTYPES, Machine, peak_flops, select
from nanolearn.overrides import loaded


def _auto_as_zero(value: Any) -> Any:
    return 0 if value == "auto" else value


class Execution(BaseModel):
    """How a recipe is run: never what it learns. "auto" (for micro_batch 0 as well) lets the plan decide, -1 stands
    for "the usual".

    >>> Execution(micro_batch=8).dtype, Execution(micro_batch="auto").micro_batch
    ('auto', 0)

    Taught in chapter 07_pretrain.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str = "auto"
    num_devices: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"  # of one node
    nodes: int = Field(default=1, ge=1)
    rendezvous: str = ""  # HOST:PORT of the first node, where there are several
    # Rows at once on one device; "auto" is kept as 0.
    micro_batch: Annotated[int, Field(ge=0), BeforeValidator(_auto_as_zero)] = 0
    dtype: Literal["auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32"] = "auto"
    compile: Literal["auto"] | bool = "auto"  # auto: on a CPU and on Apple's GPUs off, else on where it can work
    recompute: Literal["none", "1", "2"] = "none"  # 1: the MLP's hidden layer, 2: the whole block
    # sharded: 16-bit weights, fp32 ones in the optimizer's shards; none: no fp32 ones, small updates are lost. Both add
    # up the gradients of micro-steps in 16 bits.
    master: Literal["fp32", "sharded", "none"] = "fp32"
    attention: Literal["auto", "sdpa", "blocked", "flex", "flash2", "flash3"] = "auto"  # auto: model/backends.py picks
    val_tokens: int = Field(default=-1, ge=-1)  # -1: the whole split, up to a cap; 0: off
    val_every: int = Field(default=0, ge=0)
    sample_every: int = Field(default=0, ge=0)
    save_every: int = Field(default=0, ge=0)
    keep_last: int = Field(default=2, ge=1, le=1_000_000)
    keep_every: int = Field(default=0, ge=0)  # checkpoints of every so many steps are never deleted; 0: none
    resume_from: int = Field(default=-1, ge=-1)  # step of the checkpoint; -1: the newest complete one
    max_hours: float = Field(default=0.0, ge=0)  # 0: no limit where there is an accelerator
    stall_minutes: float = Field(default=10.0, ge=0)  # of silence, until a rank is named; 0: never
    disk_gb: float = Field(default=0.0, ge=0)  # what the cached corpus may take; 0: no bound
    max_passes: int = Field(default=4, ge=1)  # over the data, before a plan is refused
    price: float = Field(default=0.0, ge=0)  # of a device for an hour; 0: the plan's stated one
    peak_tflops: float = Field(default=0.0, ge=0)  # of one device; 0: from the table
    tracker: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"] = "none"
    num_threads: int = Field(default=0, ge=0, le=4096)

    def world(self, machine: Machine) -> int:
        """How many processes train, on all nodes: one a device. A CPU may be asked for several, to try ranks out.

        >>> Execution(num_devices=2, nodes=3).world(Machine("cuda", "two cards", count=2))
        6

        Raises UserError for more devices than there are.
        """
        return self.nodes * self.local_world(machine)

    def local_world(self, machine: Machine) -> int:
        """How many of them run on one node. Raises UserError for more devices than there are."""
        machine = select(machine, self.device)
        if self.num_devices == "auto":
            return machine.count
        if machine.type != "cpu" and self.num_devices > machine.count:
            raise UserError(f"num_devices={self.num_devices} on {machine.label}", f"give {machine.count} or auto")
        return self.num_devices

    def peak(self, machine: Machine, dtype: str) -> float | None:
        """Peak FLOP/s of one device: the user's figure, else the table's, else None (then no MFU is shown)."""
        return self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(machine.name, DTYPES.get(dtype, dtype))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Execution":
        """Read it back. Raises UserError, naming what is wrong."""
        return loaded(cls, path)
