"""Recipe and Execution: what is refused, what is hashed, how a notebook's words become both."""

import contextlib
import hashlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nanolearn.data.packing import PACKERS
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named
from nanolearn.optim.optimizer import Rates
from nanolearn.plan import make_plan
from nanolearn.presets import PRESETS
from nanolearn.recipe import Dials, Recipe, build, parse_overrides

CPU = Machine("cpu", "a processor", memory=16 * 10**9)


@pytest.mark.parametrize("preset", ["full", "laptop", "gpu"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 19, 20, 57, 100, 500, 1142, 1143, 5000])
def test_t7_schedules_never_jump(preset, steps):
    """At 500 steps the momentum once fell from .970 to .922 in one step."""
    recipe = Recipe.from_depth(4, preset, steps=steps)
    schedule = recipe.schedule()
    flat = steps * (1 - recipe.warmdown)
    assert recipe.warmup == min(40, max(1, steps // 20))
    assert recipe.momentum_ramp == min(400, int(0.35 * steps))
    assert recipe.warmup <= max(flat, 1)
    assert recipe.momentum_ramp <= flat
    fall = (1 - recipe.final) / (steps - flat)
    slopes = {
        "rate": max(1 / recipe.warmup, fall),
        "momentum": max(0.12 / max(recipe.momentum_ramp, 1), 0.07 / (steps - flat)),
        "decay": 0.5 * 3.1416 / steps,
    }
    for name, slope in slopes.items():
        values = [getattr(schedule, name)(step) for step in range(steps + 1)]
        assert max(abs(b - a) for a, b in zip(values, values[1:], strict=False)) <= slope * (1 + 1e-9) + 1e-12, name
    assert max(schedule.rate(step) for step in range(steps)) == pytest.approx(1.0, abs=fall)


@pytest.mark.parametrize("name", ["warmup", "momentum_ramp"])
def test_t7_ramps_that_reach_into_the_warm_down_are_refused(name):
    with pytest.raises(UserError, match=f"{name}=90 runs into the warm-down.*give at most"):
        Recipe.from_depth(4, "laptop", steps=100, **{name: 90})


def test_a_recipe_is_frozen_and_complete():
    recipe = Recipe.from_depth(4, "laptop")
    with pytest.raises(ValidationError):
        recipe.steps = 5
    with pytest.raises(ValidationError):
        Recipe(preset="laptop", depth=4)
    assert isinstance(recipe.rates(), Rates)
    assert recipe.rates().decay == recipe.decay
    assert recipe.rows_per_step * recipe.sequence_len == recipe.batch_tokens


def test_the_digest_names_every_number_and_nothing_else():
    base = Recipe.from_depth(4, "laptop", steps=100)
    again = Recipe.from_depth(4, "laptop", steps=100)
    assert base.digest == again.digest
    assert len(base.digest) == 64
    others = [
        Recipe.from_depth(4, "laptop", steps=100, seed=1),
        Recipe.from_depth(4, "laptop", steps=100, data="climbmix"),
        Recipe.from_depth(4, "laptop", steps=101),
        Recipe.from_depth(4, "laptop", steps=100, window="L"),
        Recipe.from_depth(4, "laptop", steps=100, packer="greedy_crop"),
        Recipe.from_depth(4, "laptop", steps=100, rate_head=0.5),
    ]
    assert len({r.digest for r in [base, *others]}) == 7
    assert base.name == f"gpt-d4-laptop-{base.digest[:8]}"


def test_the_digest_is_that_of_the_canonical_json():
    recipe = Recipe.from_depth(24)
    canonical = json.dumps(json.loads(recipe.model_dump_json()), sort_keys=True, separators=(",", ":"))
    assert recipe.digest == hashlib.sha256(canonical.encode()).hexdigest()


@given(st.integers(1, 30), st.sampled_from(["full", "gpu", "laptop"]), st.integers(0, 2**31))
def test_json_brings_back_the_same_recipe(depth, preset, seed):
    recipe = Recipe.from_depth(depth, preset, seed=seed)
    again = Recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe
    assert again.digest == recipe.digest


def test_saved_and_loaded(tmp_path):
    recipe, execution = Recipe.from_depth(4, "laptop"), Execution(micro_batch=8, num_devices=2)
    recipe.save(tmp_path / "recipe.json")
    execution.save(tmp_path / "execution.json")
    assert Recipe.load(tmp_path / "recipe.json").digest == recipe.digest
    assert Execution.load(tmp_path / "execution.json") == execution


@pytest.mark.parametrize("text", ["", "{", "[]", '{"preset": "laptop"}', '{"kind": "gpt2"}'])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, text):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Recipe.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="can't be read"):
        Recipe.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("dials", "said"),
    [
        ({"batch_tokens": 1000, "sequence_len": 256}, "no whole number of rows of 256: give 1024"),
        ({"packer": "best_fit"}, "did you mean best_fit"),
        ({"stepz": 5}, "did you mean steps"),
        ({"window": "X"}, "letters S"),
        ({"warmdown": 1.5}, "warmdown=1.5"),
        ({"vocab_size": 0}, "vocab_size=0: give a number greater than 0"),
        ({"seed": -1}, "seed=-1"),
        ({"rate_matrix": -0.1}, "rate_matrix=-0.1"),
    ],
)
def test_impossible_recipes_are_one_line(dials, said):
    with pytest.raises(UserError, match=said):
        Recipe.from_depth(4, "laptop", **dials)


def test_an_unknown_preset_is_refused():
    with pytest.raises(UserError, match="did you mean laptop"):
        Recipe.from_depth(4, "laptob")


def test_the_example_of_the_book_parses():
    text = "micro_batch=64 ratio=20 window=L num_devices=2 tracker=mlflow resume_from=5000"
    assert parse_overrides(text) == {
        "micro_batch": 64,
        "ratio": 20.0,
        "window": "L",
        "num_devices": 2,
        "tracker": "mlflow",
        "resume_from": 5000,
    }
    recipe, execution = build(24, "auto", "auto", 0, text, named("8 x NVIDIA H100 80GB HBM3"))
    assert (recipe.ratio, recipe.window, recipe.preset, recipe.data) == (20, "L", "full", "climbmix")
    assert (execution.micro_batch, execution.num_devices, execution.resume_from) == (64, 2, 5000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("micro_bach=64", "did you mean micro_batch"),
        ("depth=24", "-p depth"),
        ("preset=full", "-p preset"),
        ("num_devices=some", "num_devices"),
        ("tracker=none2", "tracker"),
        ("recompute=3", "recompute"),
        ("micro_batch=-1", "micro_batch=.-1.: give a number greater"),
        ("num_devices=0", "num_devices"),
        ("kind=gpt2", "unknown override"),
    ],
)
def test_n1_a_mistyped_wish_stops_everything(text, said):
    with pytest.raises(UserError, match=said):
        build(4, "laptop", "auto", 0, text, CPU)


def test_build_follows_the_machine_and_says_no_more_than_asked():
    recipe, execution = build(4, "auto", "auto", 7, "", CPU)
    assert (recipe.preset, recipe.data, recipe.seed, recipe.depth) == ("laptop", "embedded", 7, 4)
    assert execution == Execution()
    assert build(4, "auto", "auto", 0, "", named("RTX 4090"))[0].preset == "gpu"
    # On a machine with cards, device=cpu asks for what a CPU gets.
    assert build(4, "auto", "auto", 0, "device=cpu", named("H100"))[0].preset == "laptop"
    assert build(4, "laptop", "my/texts", 0, "seed=3", CPU)[0].seed == 3


def test_execution_changes_nothing_that_is_learned():
    slow, fast = (build(4, "laptop", "auto", 0, text, CPU)[0] for text in ("micro_batch=1", "dtype=bfloat16 compile=1"))
    assert slow.digest == fast.digest


def test_every_packer_can_be_asked_for():
    for packer in PACKERS:
        assert Recipe.from_depth(2, "laptop", packer=packer).packer == packer


def test_devices_used():
    eight = named("8 x H100")
    assert Execution().world(eight) == 8
    assert Execution(num_devices=2).world(eight) == 2
    assert Execution(num_devices=2).world(CPU) == 2
    with pytest.raises(UserError, match="give 8 or auto"):
        Execution(num_devices=9).world(eight)


def test_a_users_peak_is_taken():
    assert Execution(peak_tflops=10).peak(CPU, "float32") == 10e12
    assert Execution().peak(CPU, "float32") is None
    assert Execution().peak(named("H100"), "bf16") == pytest.approx(989.4e12, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "ratio=inf",
        "ratio=nan",
        "flops=inf",
        "flops=1e-300",
        "ratio=1e308",
        "tokens=1e40",
        "head_dim=0",
        "n_head=0",
        "n_layer=1e9",
        "n_layer=257",
        "keep_last=1e308",
        "rate_matrix=inf",
        "rate_matrix=nan",
        "decay=inf",
        "batch_tokens=0",
        "batch_tokens=-256",
        "steps=0",
        "steps=1e300",
        "seed=1e30",
        "max_hours=nan",
        "peak_tflops=inf",
        "price=-1",
    ],
)
@pytest.mark.parametrize("preset", ["laptop", "full"])
def test_n1_a_number_that_no_run_can_have_is_one_line(text, preset):
    with pytest.raises(UserError, match=r"[^\n]+") as caught:
        build(4, preset, "auto", 0, text, CPU)
    assert "\n" not in str(caught.value)


DIALS = sorted({*Dials.model_fields, *Execution.model_fields} - {"data", "device"})
NUMBERS = ["0", "1", "-1", "2", "3", "64", "1e3", "1e9", "1e19", "1e308", "1e-308", "inf", "nan", "auto", "L", "0.5"]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(DIALS), st.sampled_from(NUMBERS), max_size=3), st.sampled_from(sorted(PRESETS)))
def test_any_numbers_make_a_run_or_one_line(wishes, preset):
    """Never a traceback, and what is made can be planned."""
    with contextlib.suppress(UserError):
        recipe, execution = build(4, preset, "embedded", 0, " ".join(f"{k}={v}" for k, v in wishes.items()), CPU)
        plan = make_plan(recipe, execution, CPU, cpu_flops=1e11)
        assert math.isfinite(plan.hours)
        assert plan.text()


def test_micro_batch_may_be_auto():
    """One form inside, 0, whatever was written."""
    for text in ("micro_batch=auto", "micro_batch=0", ""):
        assert build(4, "laptop", "auto", 0, text, CPU)[1].micro_batch == 0
    assert build(4, "laptop", "auto", 0, "micro_batch=4", CPU)[1].micro_batch == 4
    with pytest.raises(UserError, match="micro_batch"):
        build(4, "laptop", "auto", 0, "micro_batch=most", CPU)


def test_compile_is_auto_unless_asked():
    for text, value in (("", "auto"), ("compile=auto", "auto"), ("compile=True", True), ("compile=false", False)):
        assert build(4, "laptop", "auto", 0, text, CPU)[1].compile == value
