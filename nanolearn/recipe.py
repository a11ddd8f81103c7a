"""The recipe: what is learned.

A Recipe decides the result: architecture, data, horizon, batch, rates, schedules, seed. It is frozen,
hashed, saved as JSON, and must match on resume. An Execution decides only speed and comfort, and may change
from one resume to the next. One dial, depth, sets every number of a recipe (`nanolearn.scaling`); each may
be overridden.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from nanolearn import scaling
from nanolearn.data.packing import PACKERS
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.flops import Shape
from nanolearn.hardware import Machine, select
from nanolearn.model.gpt import GPTConfig
from nanolearn.optim.optimizer import Rates
from nanolearn.optim.schedule import Schedule
from nanolearn.overrides import bounded, loaded, nearest, parse, validated
from nanolearn.presets import PRESETS, choose_data, choose_preset

# Far above any run, and low enough that no count of weights, tokens or FLOPs leaves the range of a float.
Size = Annotated[int, Field(gt=0, le=2**31)]
Layers = Annotated[int, Field(gt=0, le=scaling.MOST_LAYERS)]


class Recipe(BaseModel):
    """What is learned. Make one with `Recipe.from_depth`, which fills in every number.

    >>> r = Recipe.from_depth(24, "full", ratio=8)
    >>> r.batch_tokens, r.steps, round(r.decay, 4)
    (1048576, 5568, 0.0597)

    Raises UserError for numbers that no run can have. Taught in chapter 09_scaling_rules.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["gpt"] = "gpt"
    preset: Literal["full", "gpu", "laptop"]
    depth: Layers
    ratio: float = Field(ge=0)  # tokens seen for each weight of blocks and head: a result, for people to read
    n_layer: Layers
    n_embd: Size
    n_head: Size
    n_kv_head: Size
    head_dim: Size
    sequence_len: Size
    vocab_size: Size
    window: str
    data: str
    packer: str = "best_fit_tail"
    seed: int = Field(default=0, ge=0, lt=2**63)
    batch_tokens: int = Field(gt=0, le=2**40)
    steps: int = Field(gt=0, le=2**40)
    rate_matrix: float = Field(ge=0)
    rate_token_table: float = Field(ge=0)
    rate_value_tables: float = Field(ge=0)
    rate_head: float = Field(ge=0)
    rate_x0: float = Field(ge=0)
    rate_residual: float = Field(ge=0)
    rate_smear: float = Field(ge=0)
    decay: float = Field(ge=0)
    warmup: int = Field(ge=0)
    warmdown: float = Field(ge=0, le=1)
    final: float = Field(ge=0, le=1)
    momentum_ramp: int = Field(ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.gpt_config()  # a shape that no model can have is refused here
        if self.batch_tokens % self.sequence_len:
            near = max(round(self.batch_tokens / self.sequence_len), 1) * self.sequence_len
            raise UserError(
                f"batch_tokens={self.batch_tokens} is no whole number of rows of {self.sequence_len}",
                f"give {near}",
            )
        if self.packer not in PACKERS:
            raise UserError(f"packer {self.packer!r}", nearest(self.packer, list(PACKERS)))
        # Ramps that reach into the warm-down would make the rate or the momentum jump there.
        flat = max(int(self.steps * (1 - self.warmdown)), 1)
        for name in ("warmup", "momentum_ramp"):
            if getattr(self, name) > flat:
                said = f"{name}={getattr(self, name)} runs into the warm-down, which begins at step {flat}"
                raise UserError(said, f"give at most {flat}, or a smaller warmdown")
        return self

    @classmethod
    def from_depth(cls, depth: int, preset: str = "full", **dials: Any) -> "Recipe":
        """Every number from one dial. `dials`: a horizon (ratio, tokens, steps or flops), and what shall
        differ.

        Raises UserError for a dial that doesn't exist or values that don't go together.

        >>> Recipe.from_depth(4, "laptop", steps=100).name[:14]
        'gpt-d4-laptop-'
        """
        if preset not in PRESETS:
            raise UserError(f"preset {preset!r}", nearest(preset, PRESETS))
        family = PRESETS[preset]
        given = validated(Dials, dials).model_dump(exclude_none=True)
        config = scaling.architecture(depth, family, given)
        steps, batch = scaling.horizon(family, given, config)
        tokens = steps * batch
        numbers = {
            "preset": preset,
            "depth": depth,
            **{name: getattr(config, name) for name in GPTConfig.__dataclass_fields__},
            "data": family.data,
            **scaling.rates(family, given, config, batch, tokens),
            "warmup": min(family.warmup, max(1, steps // 20)),
            "warmdown": family.warmdown,
            "final": family.final,
            "momentum_ramp": min(family.momentum_ramp, int(0.35 * steps)),
        }
        numbers |= {name: value for name, value in given.items() if name not in ("tokens", "flops")}
        numbers |= {
            "batch_tokens": batch,
            "steps": steps,
            "ratio": float(f"{tokens / scaling.weights(config):.3g}"),
        }
        return validated(cls, numbers)

    @property
    def tokens(self) -> int:
        """Tokens that the run will see."""
        return self.steps * self.batch_tokens

    @property
    def rows_per_step(self) -> int:
        """Rows of sequence_len tokens in one optimizer step, over all devices."""
        return self.batch_tokens // self.sequence_len

    def gpt_config(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig(**{name: getattr(self, name) for name in GPTConfig.__dataclass_fields__})

    def rates(self) -> Rates:
        """Peak learning rates and Muon's decay."""
        named = {name.removeprefix("rate_"): getattr(self, name) for name in type(self).model_fields if "rate_" in name}
        return Rates(**named, decay=self.decay)

    def schedule(self) -> Schedule:
        """How rates, momentum and decay change over the steps."""
        return Schedule(self.steps, self.warmup, self.warmdown, self.final, self.momentum_ramp)

    def shape(self) -> Shape:
        """What `nanolearn.flops` counts with."""
        return scaling.shape(self.gpt_config())

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON: equal for equal recipes, on every machine."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """What the run is called: kind, depth, preset and the start of the digest."""
        return f"{self.kind}-d{self.depth}-{self.preset}-{self.digest[:8]}"

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Recipe":
        """Read it back. Raises UserError, naming what is wrong."""
        return loaded(cls, path)


def _optional(kind: Any) -> tuple[Any, None]:
    return kind | None, None


# What may be given to `from_depth`: a horizon, or any number of the recipe. Absent: depth and preset decide.
_DECIDED = {"kind", "preset", "depth"}
_DIALS = {name: _optional(bounded(field)) for name, field in Recipe.model_fields.items() if name not in _DECIDED}
_DIALS |= {"tokens": _optional(Annotated[int, Field(le=10**18)]), "flops": _optional(float)}
Dials: type[BaseModel] = create_model(  # type: ignore[call-overload]
    "Dials", __config__=ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False), **_DIALS
)


_ELSEWHERE = {
    name: f"give it as -p {name} VALUE" for name in ("depth", "preset", "run_dir", "resume", "rehearsal", "overrides")
}


def parse_overrides(text: str) -> dict[str, Any]:
    """The notebook's `overrides` as typed values of `from_depth`'s dials and of Execution.

    Raises UserError, with the nearest name, for one that neither has.

    >>> parse_overrides("micro_batch=64 ratio=20 window=L num_devices=2")
    {'micro_batch': 64, 'ratio': 20.0, 'window': 'L', 'num_devices': 2}
    """
    return parse(text, {**Dials.model_fields, **Execution.model_fields}, _ELSEWHERE)


def build(depth: int, preset: str, data: str, seed: int, overrides: str, machine: Machine) -> tuple[Recipe, Execution]:
    """A notebook's parameters as a recipe and an execution; "auto" preset and data follow the machine.

    An override wins over the parameter of the same name. Raises UserError for anything that can't be.

    >>> from nanolearn.hardware import named
    >>> build(24, "auto", "auto", 0, "ratio=8", named("8 x H100"))[0].data
    'climbmix'
    """
    wishes = parse_overrides(overrides)
    execution = validated(Execution, {name: v for name, v in wishes.items() if name in Execution.model_fields})
    preset = str(choose_preset(select(machine, execution.device), preset).value)
    dials = {"data": choose_data(preset, data).value, "seed": seed}
    dials |= {name: value for name, value in wishes.items() if name in Dials.model_fields}
    return Recipe.from_depth(depth, preset, **dials), execution
