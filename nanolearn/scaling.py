"""How one dial decides: from depth to shape, from shape to horizon, from horizon to batch, rates and decay.

Pure functions of plain numbers. The published rule computed batch, rates and decay from the horizon that
the model's size asks for, even where the user had set another; here they come from the tokens that the run
will really see. The decay formula alone explodes on short runs (rate x decay summed over a run is
constant), so it is capped. Chapter 09_scaling_rules measures how far the best rate moves with and without
these rules.
"""

import math
from collections.abc import Mapping
from typing import Any

from nanolearn.errors import UserError
from nanolearn.flops import Shape, per_token
from nanolearn.model.gpt import GPTConfig
from nanolearn.presets import Preset

BATCH_POWER = 0.383  # the best batch grows with the horizon: Bergsma et al., 2025, arXiv 2505.13738
REF_DEPTH = 12
MOST_SHRINK = 0.03  # of a weight by decay in one step: with more, short runs would flip the signs of their weights
MOST_LAYERS = 256
MOST_TOKENS = 1e18  # beyond, the numbers of rows would no longer fit into 64 bits
WIDTH_SCALED = ("rate_token_table", "rate_value_tables", "rate_head")
UNSCALED = ("rate_smear",)


def architecture(depth: int, preset: Preset, given: Mapping[str, Any]) -> GPTConfig:
    """The model's shape: depth layers, 64 of width a layer, whatever is given instead.

    Raises UserError for shapes that no model can have.

    >>> from nanolearn.presets import FULL
    >>> architecture(24, FULL, {}).n_head
    12
    """
    if not 1 <= depth <= MOST_LAYERS:
        raise UserError(f"depth {depth}", f"give a depth of 1 to {MOST_LAYERS}")
    head_dim = given.get("head_dim", preset.head_dim)
    n_embd = given.get("n_embd", given.get("n_head", 0) * head_dim or preset.width(depth))
    if "n_head" not in given and n_embd % head_dim:
        raise UserError(f"width {n_embd} is not a whole number of heads of {head_dim}", "give n_head, or another width")
    n_head = given.get("n_head", n_embd // head_dim)
    return GPTConfig(
        n_layer=given.get("n_layer", depth),
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=given.get("n_kv_head", n_head),
        head_dim=head_dim,
        sequence_len=given.get("sequence_len", preset.sequence_len),
        vocab_size=given.get("vocab_size", preset.vocab_size),
        window=given.get("window", preset.window),
    )


def weights(config: GPTConfig) -> int:
    """Weights of blocks and head, the N of the rules: those that multiply the token stream."""
    groups = config.parameter_groups()
    return groups["matrices"] + groups["head"]


def shape(config: GPTConfig) -> Shape:
    """What `nanolearn.flops` counts with."""
    groups = config.parameter_groups()
    return Shape(
        matmul_params=weights(config),
        total_params=sum(groups.values()),
        table_params=groups["token_table"] + groups["value_tables"],
        position_params=0,
        n_layer=config.n_layer,
        n_head=config.n_head,
        head_dim=config.head_dim,
        n_embd=config.n_embd,
        sequence_len=config.sequence_len,
        windows=config.windows,
    )


def reference_tokens(preset: Preset, given: Mapping[str, Any], config: GPTConfig) -> float:
    """The horizon at which the preset's rates and decay hold.

    For `full` it is that of depth 12 at the same ratio and vocabulary.
    """
    if preset.ref_tokens:
        return preset.ref_tokens
    own = {"vocab_size": config.vocab_size}
    return given.get("ratio", preset.ratio) * weights(architecture(REF_DEPTH, preset, own))


def horizon(preset: Preset, given: Mapping[str, Any], config: GPTConfig) -> tuple[int, int]:
    """Steps and tokens a step, from whichever of ratio, tokens, steps or flops is given, else the preset's
    own.

    Raises UserError for two horizons, or one that holds no step. Taught in chapter 09_scaling_rules.

    >>> from nanolearn.presets import FULL
    >>> horizon(FULL, {"steps": 500}, architecture(4, FULL, {}))
    (500, 262144)
    """
    named = [name for name in ("ratio", "tokens", "steps", "flops") if name in given]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} are two horizons", "give one of ratio, tokens, steps, flops")
    for name in named:
        if given[name] <= 0:
            raise UserError(f"{name}={given[name]} trains nothing", "give more than 0")
    steps = given.get("steps", 0 if named else preset.steps)
    tokens = _tokens(preset, given, config)
    if not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"a horizon of {tokens:.3g} tokens", f"give one of 1 to {MOST_TOKENS:.0e}")
    batch = given.get("batch_tokens", preset.batch_tokens)
    batch = batch or _batch(reference_tokens(preset, given, config), steps, tokens, config.sequence_len)
    steps = steps or int(tokens // batch)
    if steps < 1:
        raise UserError(f"{tokens:.0f} tokens are less than one step of {batch}", "give a longer horizon")
    return steps, batch


def _tokens(preset: Preset, given: Mapping[str, Any], config: GPTConfig) -> float:
    each = per_token(shape(config))
    if "tokens" in given:
        return given["tokens"]
    if "flops" in given:
        return given["flops"] / each
    if preset.flops and "ratio" not in given:
        return min(preset.flops / each, preset.max_ratio * weights(config))
    return given.get("ratio", preset.ratio) * weights(config)


def _batch(reference: float, steps: int, tokens: float, sequence_len: int) -> int:
    """2^round(log2(2^19 x (tokens / reference)^0.383)), counted in rows.

    With the horizon in steps, tokens = steps x batch stands on both sides; solved for batch that is the
    power of 1 / (1 - 0.383), and rounding the exponent keeps it a solution.
    """
    if steps:
        exact = (2**19 * (steps / reference) ** BATCH_POWER) ** (1 / (1 - BATCH_POWER))
    else:
        exact = 2**19 * (tokens / reference) ** BATCH_POWER
    return sequence_len * 2 ** max(round(math.log2(exact / sequence_len)), 0)


def rates(preset: Preset, given: Mapping[str, Any], config: GPTConfig, batch: int, tokens: int) -> dict[str, float]:
    """Peak rates and Muon's decay: the preset's, moved from its reference to this batch, width and horizon.

    Rates grow with the root of the batch (but smear and backout), tables and head also with width^-1/2;
    decay is decay_ref x sqrt(batch) x ref_tokens / tokens, at most 0.03 / Muon's peak rate. Taught in
    chapter 09_scaling_rules.

    >>> from nanolearn.presets import FULL
    >>> c = architecture(12, FULL, {})
    >>> r = rates(FULL, {}, c, 2**19, 1_321_205_760)
    >>> r["rate_matrix"], r["rate_token_table"], round(r["decay"], 3)
    (0.02, 0.3, 0.28)
    """
    root = math.sqrt(batch / preset.ref_batch)
    wide = (config.n_embd / preset.ref_width) ** -0.5
    found = {}
    for name in (field for field in preset.__dataclass_fields__ if field.startswith("rate_")):
        scale = (1.0 if name in UNSCALED else root) * (wide if name in WIDTH_SCALED else 1.0)
        found[name] = given.get(name, _six_digits(getattr(preset, name) * scale))
    formula = preset.decay * root * reference_tokens(preset, given, config) / tokens
    most = MOST_SHRINK / found["rate_matrix"] if found["rate_matrix"] > 0 else formula
    return found | {"decay": given.get("decay", _six_digits(min(formula, most)))}


def _six_digits(value: float) -> float:
    """Two machines' roots may differ in the last bit, and a recipe's digest must not."""
    return float(f"{value:.6g}")
