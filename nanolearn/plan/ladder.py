"""What to give up when a run does not fit: a ladder, from what costs nothing to what makes a worse model.

Each rung keeps all above it. The slowdowns are counted from FLOPs where the rung adds work, and estimated
for small micro-batches; none is measured on an accelerator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nanolearn.flops import per_token
from nanolearn.model.gpt import GPTConfig
from nanolearn.plan import memory
from nanolearn.recipe import Recipe
from nanolearn.scaling import shape

LAUNCH_TOKENS = 1024  # a micro-step of so many tokens is as long in launches as in work: an estimate


@dataclass(frozen=True)
class Rung:
    """What to ask for, what it is, the bytes that are then needed, how many times longer the run then takes."""

    ask: str
    what: str
    memory: int
    slowdown: float
    fits: bool


def climb(recipe: Recipe, kind: str, dtype: str, available: int, rows: int, world: int = 1) -> tuple[Rung, ...]:
    """The ladder for a run that holds `rows` rows at once now on each of `world` devices; `kind` is the device's type.

    >>> rungs = climb(Recipe.from_depth(24), "cuda", "bfloat16", 24 * 10**9, rows=4)
    >>> [(rung.ask, round(rung.memory / 1e9), rung.fits) for rung in rungs][-2:]
    [('recompute=2', 26, False), ('master=none', 21, True)]

    Taught in chapter 14_scaling_out.
    """
    config = recipe.gpt_config()
    found: list[Rung] = []
    for ask, what, changed, recompute, master in _rungs(config, memory.BYTES[dtype] < memory.FP32, world):
        options = {"kind": kind, "dtype": dtype, "recompute": recompute, "master": master}
        need = memory.estimate(changed, 1, world=world, **options).total
        if "sequence_len" in ask and (found[-1].fits or need == found[-1].memory):
            break  # nobody should train a worse model without need
        slower = _launches(changed.sequence_len) / _launches(rows * config.sequence_len)
        slower *= _work(changed, recompute) / per_token(shape(config))
        found.append(Rung(ask, what, need, slower, need <= available))
    return tuple(found)


def _rungs(config: GPTConfig, sixteen: bool, world: int) -> Iterator[tuple[str, str, GPTConfig, str, str]]:
    """What to ask for, what it is, the shape, recompute, master; sharded masters pay where there are several ranks."""
    yield "micro_batch=1", "one row at a time", config, "none", "fp32"
    yield "recompute=1", "MLPs computed again in the backward", config, "1", "fp32"
    yield "recompute=2", "whole blocks computed again", config, "2", "fp32"
    if sixteen and world > 1:
        yield (
            "master=sharded",
            "16-bit weights, gradients add up in 16 bits; fp32 weights in shards",
            config,
            "2",
            "sharded",
        )
    last = "none" if sixteen else "fp32"
    if sixteen:
        yield "master=none", "16-bit weights: small updates are lost", config, "2", last
    shorter = config.sequence_len // 2
    while shorter >= 256:
        small = GPTConfig(**{**vars(config), "sequence_len": shorter})
        yield f"sequence_len={shorter}", "shorter rows: a worse model", small, "2", last
        shorter //= 2


def _launches(tokens: int) -> float:
    return 1 + LAUNCH_TOKENS / tokens


def _work(config: GPTConfig, recompute: str) -> float:
    """FLOPs of a token, with what recomputation adds: a part of the forward, which is a third of all."""
    whole = per_token(shape(config))
    head = 6 * config.parameter_groups()["head"]
    mlp_in = 6 * config.n_layer * 4 * config.n_embd**2
    return whole + {"none": 0, "1": mlp_in, "2": whole - head}[recompute] / 3
