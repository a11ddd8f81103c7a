"""A plan as a page that a person reads: made from the plan's own numbers, as `--json` gives them.

Taking the JSON and not the objects keeps the two from ever saying different things.
"""

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Numbers = Mapping[str, Any]
LABEL, WIDTH = 12, 108


def significant(value: float) -> str:
    """A number with three digits that mean something, and no exponent.

    >>> significant(828_803), significant(1.4189), significant(0.01428)
    ('829,000', '1.42', '0.0143')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def size(count: float) -> str:
    """Bytes in the unit that a person would use, of 10^9 or 10^6.

    >>> size(5_536_488_488), size(105e9), size(29_400_000)
    ('5.54 GB', '105 GB', '29.4 MB')
    """
    return f"{significant(count / 1e9)} GB" if count >= 1e8 else f"{significant(count / 1e6)} MB"


def tokens(count: float) -> str:
    """A count of tokens in words.

    >>> tokens(4_030_000), tokens(399e9)
    ('4.03 million tokens', '399 billion tokens')
    """
    return (
        f"{significant(count / 1e9)} billion tokens" if count >= 1e9 else f"{significant(count / 1e6)} million tokens"
    )


def duration(hours: float | None) -> str:
    """Hours in the unit that a person would use.

    >>> duration(0.0004), duration(0.05), duration(1.96), duration(62.06), duration(None)
    ('1.44 s', '3 min', '1.96 h', '62.1 h (2.6 days)', 'unknown')
    """
    if hours is None:
        return "unknown"
    if hours < 1 / 60:
        return f"{significant(hours * 3600)} s"
    if hours < 1:
        return f"{significant(hours * 60)} min"
    return f"{significant(hours)} h" + (f" ({hours / 24:,.1f} days)" if hours >= 48 else "")


def render(plan: Numbers) -> str:
    """The whole page; the refusal comes last if there is one.

    >>> from nanolearn.plan import make_plan
    >>> from nanolearn.recipe import Execution, Recipe
    >>> from nanolearn.hardware import named
    >>> plan = make_plan(Recipe.from_depth(24), Execution(), named("8 x H100"))
    >>> [line.strip() for line in plan.text().splitlines() if line.startswith("  training")]
    ['training    8,757,706,752 tokens (12 a weight of blocks and head), 8,352 steps of 1,048,576']

    Taught in chapter 09_scaling_rules.
    """
    lines = [f"Plan of {plan['name']}"]
    for label, text in _lines(plan):
        glued = re.sub(r"(\d) (?=GB|MB|h\b|min\b|s\b)", "\\1\0", f"{label:{LABEL}}{text}")  # a number keeps its unit
        wrapped = textwrap.wrap(glued, WIDTH, initial_indent="  ", subsequent_indent=" " * (LABEL + 2))
        lines += [line.replace("\0", " ") for line in wrapped]
    if plan["problems"]:
        lines += ["", *refusal(plan)]
    return "\n".join(lines)


def refusal(plan: Numbers) -> list[str]:
    """Why the run may not start, what would help, and the ladder where memory is what lacks."""
    lines = ["REFUSED: this run would not fit, or not end"]
    lines += [f"  - {problem}" for problem in plan["problems"]]
    lines += ["Ways out (NAME=VALUE is an override)", *(f"  - {way}" for way in plan["ways_out"])]
    if plan["ladder"]:
        lines += [
            "Memory of a device, each line with all above it; time as a multiple of now, counted or estimated",
        ]
        lines += [
            f"  {rung['ask']:20}{size(rung['memory']):>9}  {'fits' if rung['fits'] else 'no':6}"
            f"time x {rung['slowdown']:<6.2f}{rung['what']}"
            for rung in plan["ladder"]
        ]
    return lines


def _lines(plan: Numbers) -> Iterator[tuple[str, str]]:
    recipe, dtype = plan["recipe"], plan["dtype"]
    yield "machine", f"{plan['machine']}: {plan['num_devices']} used, {dtype['value']} ({dtype['reason']})"
    yield (
        "model",
        f"{recipe['n_layer']} layers, width {recipe['n_embd']}, {recipe['n_head']} heads of {recipe['head_dim']}, "
        f"{recipe['n_kv_head']} for keys and values, rows of {recipe['sequence_len']:,} tokens, windows "
        f"{_windows(recipe, plan['windows'])}, vocabulary {recipe['vocab_size']:,}",
    )
    groups = [f"{name.replace('_', ' ')} {count:,}" for name, count in plan["parameters"].items()]
    yield "parameters", f"{sum(plan['parameters'].values()):,} = {' + '.join(groups)}"
    yield (
        "training",
        f"{plan['tokens']:,} tokens ({recipe['ratio']:g} a weight of blocks and head), "
        f"{recipe['steps']:,} steps of {recipe['batch_tokens']:,}",
    )
    rows = recipe["batch_tokens"] // recipe["sequence_len"]
    yield (
        "a step",
        f"{rows:,} rows = micro_batch {plan['micro_batch']} x devices {plan['num_devices']} x accumulation "
        f"{plan['accumulation']}",
    )
    yield "rates", _rates(recipe)
    yield "compute", f"{plan['flops']:.3g} FLOPs, {plan['flops_per_token']:.4g} a token (canonical)"
    yield "memory", _memory(plan)
    yield from _costs(plan)


def _windows(recipe: Numbers, windows: Collection[int]) -> str:
    # A short window is no shorter than 128: where rows are as short as that, the pattern changes nothing.
    idle = "S" in recipe["window"] and set(windows) == {recipe["sequence_len"]}
    return recipe["window"] + (f" (all full: rows of {recipe['sequence_len']:,})" if idle else "")


def _rates(recipe: Numbers) -> str:
    named = {name.removeprefix("rate_"): value for name, value in recipe.items() if name.startswith("rate_")}
    said = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in named.items())
    return f"{said}; decay {recipe['decay']:.3g}; warm-up {recipe['warmup']} steps, warm-down {recipe['warmdown']:.0%}"


def _memory(plan: Numbers) -> str:
    found = plan["memory"]
    kinds = [
        f"weights {size(found['weights'])}",
        f"gradients {size(found['gradients'])}",
        f"optimizer state {size(found['optimizer'])}",
        f"activations {size(found['activations'])}",
        f"loss {size(found['logits'])}",
        f"framework {size(found['reserve'])}",
    ]
    step = f"; Muon's step takes {size(found['step'])} when activations are gone"
    return f"{size(found['total'])} of {size(found['available'])} a device: {', '.join(kinds)}{step}"


def _costs(plan: Numbers) -> Iterator[tuple[str, str]]:
    speed, data, disk = plan["speed"], plan["data"], plan["disk"]
    rate = speed["tokens_per_second"]
    pace = f" at {significant(rate)} tokens/s" if rate else ""
    yield "time", f"{duration(plan['hours'])}{pace}, without validation and saves ({speed['basis']})"
    if plan["cost"] is not None:
        yield "cost", f"${plan['cost']:,.2f} at ${plan['price']:.2f} for a device and hour ({plan['price_basis']})"
    elif plan["machine_type"] == "cuda":
        yield "cost", f"unknown ({plan['price_basis']} for a device and hour)"
    passes = "an unknown number of" if data["passes"] is None else significant(data["passes"])
    present = "" if data["present"] is None else f", about {tokens(data['present'])}"
    again = " (more than one: it sees the same text again)" if (data["passes"] or 0) > 1 else ""
    yield "data", f"{plan['recipe']['data']}{present}: {passes} passes over it{again}"
    fetched = "an unknown amount" if data["download"] is None else f"at most {size(data['download'])}"
    bound = plan["execution"]["disk_gb"]
    dropped = bound and (data["passes"] or 0) > 1 and bound * 1e9 < (data["download"] or 0) + data["token_shards"]
    yield "download", fetched + (", in each pass, since disk_gb drops what was read" if dropped else "")
    yield (
        "tokenising",
        f"{duration(data['tokenise_hours'])} on {data['cores']} cores "
        f"({data['tokenise_rate'] / 1e6:.1f} MB/s a core, stated)",
    )
    held = f" (of both at most {size(bound * 1e9)} at once)" if bound else ""
    yield (
        "disk",
        f"{size(disk['total'])}: text {fetched.removeprefix('at most ')}, token shards "
        f"{size(data['token_shards'])}{held}, {disk['checkpoints']} checkpoints of {size(disk['checkpoint'])}",
    )
