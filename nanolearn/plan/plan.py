"""A plan in numbers, and what is asked of it: does it fit, what does it cost, may it start, how does it read."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.flops import per_token
from nanolearn.hardware import Choice, Machine
from nanolearn.plan import memory, page
from nanolearn.plan.costs import Data, Speed
from nanolearn.plan.ladder import Rung
from nanolearn.plan.memory import Memory
from nanolearn.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """A run in numbers: bytes, tokens, hours. Made by `make_plan`; printed by `text`, refused by `check`.

    Taught in chapter 09_scaling_rules.
    """

    recipe: Recipe
    execution: Execution
    machine: Machine
    world: int
    dtype: Choice
    micro_batch: int
    memory: Memory
    available: int  # bytes of a device that the run may take
    tokens_left: int
    speed: Speed
    price: float | None  # dollars for a device and hour
    price_basis: str
    data: Data
    problems: tuple[str, ...] = ()
    ways_out: tuple[str, ...] = ()
    ladder: tuple[Rung, ...] = ()

    @property
    def accumulation(self) -> int:
        """Micro-steps of each device in one optimizer step."""
        return self.recipe.rows_per_step // (self.micro_batch * self.world)

    @property
    def fits(self) -> bool:
        """Whether a device holds it, with some of its memory to spare."""
        return self.memory.total <= self.available

    @property
    def hours(self) -> float | None:
        """Hours of training that are left, without validation and saves; None if the device's speed is unknown."""
        return self.speed.hours(self.tokens_left)

    @property
    def cost(self) -> float | None:
        """Dollars for those hours."""
        return None if self.hours is None or self.price is None else self.hours * self.world * self.price

    @property
    def finishes(self) -> bool:
        """Whether it may start: it fits, ends in time, and has data enough."""
        return not self.problems

    @property
    def refusal(self) -> str | None:
        """The page that says why it may not start and what would help; None if it may."""
        return None if self.finishes else "\n".join(page.refusal(self.numbers()))

    def check(self) -> None:
        """Raise UserError, in one line, if the plan is refused."""
        if self.problems:
            raise UserError(self.problems[0], self.ways_out[0] if self.ways_out else "")

    def text(self) -> str:
        """The plan as a page to print, with the refusal below it if it is refused."""
        return page.render(self.numbers())

    def to_json(self) -> str:
        """Everything in it, for machines."""
        return json.dumps(self.numbers(), indent=2)

    def numbers(self) -> dict[str, Any]:
        """Everything in it as plain values: bytes, tokens, hours, dollars."""
        each = per_token(self.recipe.shape())
        checkpoint, kept = memory.checkpoint_bytes(self.recipe.gpt_config()), self.execution.keep_last + 1
        corpus = (self.data.download or 0) + self.data.token_shards
        if self.execution.disk_gb:
            corpus = min(corpus, int(self.execution.disk_gb * 1e9))
        disk = corpus + kept * checkpoint
        return {
            "name": self.recipe.name,
            "machine": self.machine.label,
            "machine_type": self.machine.type,
            "simulated": self.machine.simulated,
            "num_devices": self.world,
            "dtype": asdict(self.dtype),
            "parameters": self.recipe.gpt_config().parameter_groups(),
            "windows": self.recipe.gpt_config().windows,
            "tokens": self.recipe.tokens,
            "tokens_left": self.tokens_left,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "flops_per_token": each,
            "flops": each * self.recipe.tokens,
            "memory": {**asdict(self.memory), "total": self.memory.total, "available": self.available},
            "speed": asdict(self.speed),
            "hours": self.hours,
            "price": self.price,
            "price_basis": self.price_basis,
            "cost": self.cost,
            "data": asdict(self.data),
            "disk": {"total": disk, "checkpoint": checkpoint, "checkpoints": kept},
            "fits": self.fits,
            "finishes": self.finishes,
            "problems": list(self.problems),
            "ways_out": list(self.ways_out),
            "ladder": [asdict(rung) for rung in self.ladder],
            "recipe": self.recipe.model_dump(),
            "execution": self.execution.model_dump(),
        }
