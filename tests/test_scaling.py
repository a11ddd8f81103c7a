"""The rules against the golden table, and against themselves where a horizon is given in another unit (T8)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.errors import UserError
from nanolearn.flops import per_token
from nanolearn.presets import FULL, LAPTOP, PRESETS
from nanolearn.recipe import Recipe
from nanolearn.scaling import architecture, horizon, rates, weights

D12 = 1_321_210_944  # tokens: the horizon of depth 12 at ratio 12 and a vocabulary of 32,768

# depth, width, parameters M, N M, tokens B, log2 batch, steps, rate x, decay, table x, FLOPs a token; at ratio 12.
GOLDEN = """
4   256   36.7   11.5   0.138  18  528    .707   1.89    1.732  8.02e7
8   512   125.8  41.9   0.503  18  1920   .707   0.52    1.225  2.96e8
12  768   286.3  110.1  1.321  19  2520   1      0.28    1      7.60e8
16  1024  536.9  234.9  2.819  19  5376   1      0.131   .866   1.59e9
20  1280  896.5  435.2  5.222  20  4980   1.414  0.100   .775   2.89e9
24  1536  1384.1 729.8  8.758  20  8352   1.414  0.060   .707   4.775e9
26  1664  1681.8 918.4  11.02  20  10510  1.414  0.0475  .679   5.99e9
32  2048  2818.6 1677.7 20.13  21  9600   2      0.037   .612   1.08e10
"""
ROWS = [line.split() for line in GOLDEN.strip().splitlines()]


def half_a_digit(text: str) -> float:
    """Half of the last digit that is shown."""
    mantissa, _, exponent = text.partition("e")
    return 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"depth-{row[0]}")
def test_golden_table_to_the_digits_shown(row):
    recipe = Recipe.from_depth(int(row[0]), "full")
    config = recipe.gpt_config()
    found = {
        "width": recipe.n_embd,
        "parameters": sum(config.parameter_groups().values()) / 1e6,
        "N": weights(config) / 1e6,
        "tokens": recipe.tokens / 1e9,
        "batch": math.log2(recipe.batch_tokens),
        "steps": recipe.steps,
        "rate": recipe.rate_matrix / 0.02,
        "decay": recipe.decay,
        "table": recipe.rate_token_table / 0.3 / (recipe.rate_matrix / 0.02),
        "flops": per_token(recipe.shape()),
    }
    for (name, value), shown in zip(found.items(), row[1:], strict=True):
        assert value == pytest.approx(float(shown), abs=half_a_digit(shown), rel=0), name
    assert (recipe.n_head, recipe.head_dim, recipe.n_kv_head) == (recipe.n_embd // 128, 128, recipe.n_head)
    assert recipe.ratio == 12


def test_depth_24_to_the_parameter():
    groups = Recipe.from_depth(24).gpt_config().parameter_groups()
    assert groups == {
        "token_table": 50_331_648,
        "value_tables": 603_979_776,
        "head": 50_331_648,
        "matrices": 679_478_976,
        "scalars": 74,
    }
    assert sum(groups.values()) == 1_384_122_122


def test_ratio_8():
    recipe = Recipe.from_depth(24, ratio=8)
    assert (round(recipe.tokens / 1e9, 3), recipe.batch_tokens, recipe.steps) == (5.838, 2**20, 5568)
    assert round(recipe.decay, 4) == 0.0597  # the reference horizon has ratio 8 too


def test_every_rate_of_depth_24():
    recipe = Recipe.from_depth(24)
    root, wide = math.sqrt(2), (1536 / 768) ** -0.5
    expected = {
        "rate_matrix": 0.02 * root,
        "rate_token_table": 0.3 * root * wide,
        "rate_value_tables": 0.15 * root * wide,
        "rate_head": 0.008 * root * wide,
        "rate_x0": 0.5 * root,
        "rate_residual": 0.005 * root,
        "rate_smear": 0.2,
    }
    assert {name: getattr(recipe, name) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_t8_a_horizon_in_tokens_sets_decay_and_not_the_models_own():
    """A published run of 15.2 B tokens printed decay .0422, its model's own; its tokens ask for .0243."""
    recipe = Recipe.from_depth(24, steps=29_000, batch_tokens=524_288, window="L")
    assert round(recipe.decay, 4) == 0.0243
    assert recipe.tokens == 15_204_352_000
    assert round(per_token(recipe.shape()) / 1e9, 4) == 5.2848


def test_t8_decay_of_a_short_run_is_capped():
    """4e5 tokens would ask for decay 231, 1.16 a step."""
    recipe = Recipe.from_depth(4, tokens=400_000)
    formula = 0.28 * math.sqrt(recipe.batch_tokens / 2**19) * D12 / 400_000
    assert round(formula) == 231
    assert recipe.decay * recipe.rate_matrix == pytest.approx(0.03, rel=1e-5)


@pytest.mark.parametrize("depth", [4, 12, 24])
@pytest.mark.parametrize("tokens", [3e8, 1e9, 2e10, 4e11])
def test_t8_batch_rate_and_decay_follow_the_tokens_seen(depth, tokens):
    recipe = Recipe.from_depth(depth, tokens=int(tokens))
    batch = 2 ** round(math.log2(2**19 * (tokens / D12) ** 0.383))
    assert recipe.batch_tokens == batch
    assert recipe.tokens == pytest.approx(tokens, abs=batch)
    assert recipe.rate_matrix == pytest.approx(0.02 * math.sqrt(batch / 2**19), rel=1e-5)
    formula = 0.28 * math.sqrt(batch / 2**19) * D12 / recipe.tokens
    assert recipe.decay == pytest.approx(min(formula, 0.03 / recipe.rate_matrix), rel=1e-5)


@given(st.integers(2, 40), st.floats(1e8, 1e12))
def test_t8_the_unit_of_the_horizon_does_not_matter(depth, tokens):
    by_tokens = Recipe.from_depth(depth, tokens=int(tokens))
    each = per_token(by_tokens.shape())
    by_flops = Recipe.from_depth(depth, flops=int(tokens) * each * (1 + 1e-12))
    assert (by_flops.steps, by_flops.batch_tokens) == (by_tokens.steps, by_tokens.batch_tokens)
    assert by_flops.digest == by_tokens.digest


@given(st.integers(2, 40), st.integers(1, 200_000))
def test_t8_a_horizon_in_steps_gives_the_batch_that_its_own_tokens_ask_for(depth, steps):
    recipe = Recipe.from_depth(depth, steps=steps)
    assert recipe.steps == steps
    rule = 2**19 * (recipe.tokens / D12) ** 0.383
    assert recipe.batch_tokens == max(2 ** round(math.log2(rule)), recipe.sequence_len)


def test_t8_ratio_and_steps_that_agree_are_one_recipe():
    assert Recipe.from_depth(24, steps=8352).digest == Recipe.from_depth(24).digest


@pytest.mark.parametrize("preset", ["laptop", "gpu"])
def test_t8_small_presets_keep_batch_and_rates_and_move_decay(preset):
    family = PRESETS[preset]
    usual, longer = Recipe.from_depth(8, preset), Recipe.from_depth(8, preset, tokens=8 * family.ref_tokens)
    assert usual.batch_tokens == longer.batch_tokens == family.batch_tokens
    assert usual.rates().matrix == longer.rates().matrix
    assert longer.decay == pytest.approx(family.decay * family.ref_tokens / longer.tokens, rel=1e-3)


def test_a_preset_at_its_reference_has_its_own_numbers():
    config = architecture(4, LAPTOP, {"n_embd": LAPTOP.ref_width})
    found = rates(LAPTOP, {}, config, LAPTOP.ref_batch, LAPTOP.ref_tokens)
    assert found == pytest.approx({name: getattr(LAPTOP, name) for name in found}, rel=1e-5)


@given(st.integers(1, 40), st.floats(1e5, 1e12), st.sampled_from(["full", "gpu", "laptop"]))
def test_no_step_shrinks_a_weight_by_more_than_3_percent(depth, tokens, preset):
    recipe = Recipe.from_depth(depth, preset, tokens=int(tokens))
    assert 0 < recipe.decay * recipe.rate_matrix <= 0.03 * (1 + 1e-5)
    assert recipe.batch_tokens % recipe.sequence_len == 0
    assert recipe.tokens <= tokens


def test_a_given_rate_is_what_decay_is_capped_by():
    recipe = Recipe.from_depth(4, "full", tokens=400_000, rate_matrix=0.1)
    assert recipe.rate_matrix == 0.1
    assert recipe.decay == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("given_dials", "said"),
    [
        ({"ratio": 8.0, "steps": 5}, "ratio and steps are two horizons"),
        ({"tokens": 0}, "trains nothing"),
        ({"steps": -1}, "trains nothing"),
        ({"tokens": 100}, "less than one step"),
    ],
)
def test_impossible_horizons_are_refused(given_dials, said):
    with pytest.raises(UserError, match=said):
        horizon(FULL, given_dials, architecture(4, FULL, {}))


def test_shapes_follow_from_what_is_given():
    assert architecture(6, FULL, {"n_embd": 256}).n_head == 2
    assert architecture(6, FULL, {"n_head": 3}).n_embd == 384
    assert architecture(6, FULL, {"n_layer": 2}).n_layer == 2
    assert architecture(24, FULL, {"n_layer": 4}).n_embd == 1536
    assert architecture(12, FULL, {"n_kv_head": 2}).n_kv_head == 2
    with pytest.raises(UserError, match="give a depth"):
        architecture(0, FULL, {})
    with pytest.raises(UserError, match="whole number of heads"):
        architecture(6, FULL, {"n_embd": 300})
