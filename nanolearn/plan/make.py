"""Making a plan: shares, micro-batch, hours; then the verdict, with its ways out."""

import math
from collections.abc import Iterator
from dataclasses import replace

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, choose_dtype, select
from nanolearn.plan import costs, memory, page
from nanolearn.plan.ladder import Rung, climb
from nanolearn.plan.plan import Plan
from nanolearn.presets import PRESETS
from nanolearn.recipe import Recipe

# Share of a device's memory that stays free. Apple's GPUs may use about three quarters of the host's.
SPARE = {"cpu": 0.10, "cuda": 0.10, "mps": 0.30}
CPU_HOURS = 24.0  # a CPU run that needs more is refused unless max_hours allows it
EMBEDDED_PASSES = 40  # over the embedded corpus; beyond, a model learns it by heart


def make_plan(
    recipe: Recipe,
    execution: Execution,
    machine: Machine,
    *,
    data_tokens: int | None = None,
    done_steps: int = 0,
    mfu: float | None = None,
    cpu_flops: float | None = None,
) -> Plan:
    """Plan a recipe on a machine.

    data_tokens: training tokens, where they are counted; done_steps: of a run that is resumed; mfu (a
    share) and cpu_flops (FLOP/s, also of Apple's GPU): what was measured, in place of what is assumed. Raises
    UserError for wishes that contradict each other; a run that doesn't fit or end is no error but a refused plan.
    Taught in chapter 09_scaling_rules.

    >>> from nanolearn.hardware import named
    >>> plan = make_plan(Recipe.from_depth(24, ratio=8), Execution(), named("8 x H100"))
    >>> plan.micro_batch, plan.accumulation, round(plan.hours, 2), round(plan.cost)
    (16, 4, 1.96, 55)
    """
    machine = select(machine, execution.device)
    world, dtype = execution.world(machine), choose_dtype(machine, execution.dtype)
    cpu_flops = cpu_flops or costs.measure(machine)
    rows = choose_micro_batch(recipe, execution, machine)
    price, basis = costs.price(execution, machine)
    plan = Plan(
        recipe=recipe,
        execution=execution,
        machine=machine,
        world=world,
        dtype=dtype,
        micro_batch=rows,
        memory=_need(recipe, execution, machine, str(dtype.value), rows, world),
        available=_available(machine, world // execution.nodes),
        tokens_left=recipe.tokens - done_steps * recipe.batch_tokens,
        speed=costs.speed(recipe, execution, machine, str(dtype.value), world, mfu, cpu_flops),
        price=price,
        price_basis=basis,
        data=costs.data(recipe, machine, data_tokens),
    )
    return _judged(plan, mfu, cpu_flops)


def choose_micro_batch(recipe: Recipe, execution: Execution, machine: Machine, world: int | None = None) -> int:
    """Rows at once on one device: as asked, else the largest power of two that divides its rows and fits, or 1.

    world: how many processes really run, where torchrun and not the plan decided it.
    Raises UserError where the rows of a step can't be shared alike. Taught in chapter 06_mfu.

    >>> from nanolearn.hardware import named
    >>> choose_micro_batch(Recipe.from_depth(24, window="L"), Execution(), named("MI300X"))
    32
    """
    machine = select(machine, execution.device)
    world = execution.world(machine) if world is None else world
    dtype = str(choose_dtype(machine, execution.dtype).value)
    each, left = divmod(recipe.rows_per_step, world)
    if left or not each:
        raise UserError(
            f"{recipe.rows_per_step} rows a step can't be shared alike by {world} devices",
            f"take {math.gcd(recipe.rows_per_step, world)} (num_devices), or another batch_tokens",
        )
    if asked := execution.micro_batch:
        if each % asked:
            near = max(rows for rows in range(1, min(asked, each) + 1) if each % rows == 0)
            raise UserError(f"micro_batch={asked} does not divide {each} rows a device", f"give {near}")
        return asked
    rows = each & -each  # the largest power of two that divides it
    while rows > 1 and _need(recipe, execution, machine, dtype, rows, world).total > _available(
        machine, world // execution.nodes
    ):
        rows //= 2
    return rows


def _available(machine: Machine, processes: int) -> int:
    share = 1 / processes if machine.type == "cpu" else 1.0  # those on one host share its memory
    return int(machine.memory * share * (1 - SPARE[machine.type]))


def _need(recipe: Recipe, execution: Execution, machine: Machine, dtype: str, rows: int, world: int) -> memory.Memory:
    return memory.estimate(
        recipe.gpt_config(),
        rows,
        kind=machine.type,
        dtype=dtype,
        recompute=execution.recompute,
        master=execution.master,
        world=world,
    )


def _judged(plan: Plan, mfu: float | None, cpu_flops: float | None) -> Plan:
    # On an accelerator max_hours stops a run cleanly, to be taken up again (a job of a chain); it forbids nothing.
    limit = (plan.execution.max_hours or CPU_HOURS) if plan.machine.type == "cpu" else math.inf
    dtype, kind = str(plan.dtype.value), plan.machine.type
    problems: list[str] = []
    ways: list[str] = []
    ladder: tuple[Rung, ...] = ()
    if not plan.fits:
        ladder = climb(plan.recipe, kind, dtype, plan.available, plan.micro_batch, plan.world)
        said = f"{page.size(plan.memory.total)} are needed, {page.size(plan.available)} may be taken"
        problems.append(f"{said} of {plan.machine.name}, with {plan.micro_batch} rows at once (micro_batch)")
        if ladder[0].fits:
            ways.append("micro_batch=auto: the plan then takes as many rows as fit")
    if plan.hours is not None and plan.hours > limit:
        problems.append(f"about {page.duration(plan.hours)} are needed, and {page.duration(limit)} is the limit")
        fewer = float(f"{plan.recipe.tokens * limit / plan.hours:.2g}")
        ways.append(f"tokens={fewer:.0f}: the same model, trained for less long")
        ways.append(f"max_hours={math.ceil(plan.hours * 1.25)}: if you mean to wait")
    if problems:
        ways = [*_smaller(plan, limit, mfu, cpu_flops), *ways]
    for problem, way in _too_many_passes(plan):
        problems.append(problem)
        ways.append(way)
    return replace(plan, problems=tuple(problems), ways_out=tuple(ways), ladder=ladder)


# What a depth decides unless it is given, in an order in which each follows only from those before it.
_SHAPE = ("head_dim", "n_layer", "n_embd", "n_head", "n_kv_head", "sequence_len", "vocab_size", "window", "data")


def _given(recipe: Recipe) -> dict[str, object]:
    """The dials without which a recipe of this depth would be another one, as far as memory and hours go.

    >>> _given(Recipe.from_depth(24, ratio=8, window="L")), _given(Recipe.from_depth(4, "laptop"))
    ({'window': 'L', 'ratio': 8.0}, {})
    """
    found: dict[str, object] = {}
    horizon = "steps" if PRESETS[recipe.preset].steps else "ratio"
    for name in (*_SHAPE, horizon, "batch_tokens"):
        try:
            usual = getattr(Recipe.from_depth(recipe.depth, recipe.preset, **found), name)
        except UserError:
            usual = None  # a shape that only the next dials make possible
        if usual != getattr(recipe, name):
            found[name] = getattr(recipe, name)
    return found


def _smaller(plan: Plan, limit: float, mfu: float | None, cpu_flops: float | None) -> Iterator[str]:
    """The largest depth below this one that this machine can train, with what else was asked for."""
    dtype, dials = str(plan.dtype.value), _given(plan.recipe)
    also = "".join(f" {name}={value}" for name, value in dials.items())
    for depth in range(plan.recipe.depth - 1, 0, -1):
        try:
            recipe = Recipe.from_depth(depth, plan.recipe.preset, **dials)
        except UserError:
            continue  # what was asked for leaves this depth no possible shape
        need = _need(recipe, plan.execution, plan.machine, dtype, 1, plan.world)
        found = costs.speed(recipe, plan.execution, plan.machine, dtype, plan.world, mfu, cpu_flops)
        hours = found.hours(recipe.tokens)
        if need.total <= plan.available and (hours is None or hours <= limit):
            yield f"depth {depth}{also and ' with' + also}: fits, and takes {page.duration(hours)}"
            return


def _too_many_passes(plan: Plan) -> Iterator[tuple[str, str]]:
    passes, most, present = plan.data.passes, plan.execution.max_passes, plan.data.present or 0
    if passes is None:
        return
    if plan.recipe.data == "embedded" and passes > EMBEDDED_PASSES:
        said = f"{passes:,.0f} passes over the embedded corpus, which is good for {EMBEDDED_PASSES} at most"
        yield said, "data=climbmix, or a corpus of your own"
    elif passes > most:
        fewer = float(f"{most * present:.2g}")
        way = f"max_passes={math.ceil(passes)} if you mean it, tokens={fewer:.0f}, or more data"
        yield f"{passes:,.1f} passes over the data, and max_passes is {most}", way
