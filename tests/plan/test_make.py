"""Whole plans: published runs, what is refused and why, and how the micro-batch is chosen."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named, select
from nanolearn.plan import choose_micro_batch, make_plan, page
from nanolearn.plan.memory import estimate
from nanolearn.recipe import Recipe, build, parse_overrides

CPU = Machine("cpu", "a processor", memory=32 * 10**9)
H100S = named("8 x NVIDIA H100 80GB HBM3")
MI300X = named("AMD Instinct MI300X")
SLOW = 25e9  # FLOP/s of matrix products: two cores of a busy machine


def test_hours_of_the_reference_run_on_8_h100():
    """Depth 24, ratio 12: 3.04 h at about 50% (bits per byte .74833)."""
    plan = make_plan(Recipe.from_depth(24), Execution(), H100S)
    assert plan.hours == pytest.approx(3.04, rel=0.05)
    assert plan.speed.tokens_per_second == pytest.approx(800_000, rel=0.05)
    assert plan.cost == pytest.approx(plan.hours * 28, rel=1e-6)


def test_hours_of_the_ratio_8_run_at_its_own_speed():
    """1.65 h at about 983,000 tokens/s, which is 59% and not 50%."""
    recipe = Recipe.from_depth(24, ratio=8)
    share = 983_000 * 4.7752e9 / (8 * 989.4e12)
    assert make_plan(recipe, Execution(), H100S, mfu=share).hours == pytest.approx(1.65, rel=0.01)
    assert make_plan(recipe, Execution(), H100S).hours == pytest.approx(1.65, rel=0.2)


def test_the_published_mi300x_run():
    """62 h at 27.5%, 32 rows x 8 micro-steps, 29,000 steps of 524,288 tokens."""
    recipe = Recipe.from_depth(24, window="L", steps=29_000, batch_tokens=524_288)
    plan = make_plan(recipe, Execution(), MI300X)
    assert plan.hours == pytest.approx(62, rel=0.02)
    assert plan.speed.tokens_per_second == pytest.approx(68_089, rel=0.01)
    assert (plan.micro_batch, plan.accumulation, plan.world) == (32, 8, 1)
    assert plan.finishes
    assert plan.dtype.value == "bfloat16"


def test_t15_accumulation_is_from_the_recipe_and_the_real_world():
    laptop = make_plan(Recipe.from_depth(4, "laptop"), Execution(), CPU, cpu_flops=1e11)
    assert laptop.accumulation == 1
    assert laptop.micro_batch == laptop.recipe.rows_per_step
    for devices in (1, 2, 4, 8):
        plan = make_plan(Recipe.from_depth(24), Execution(num_devices=devices), H100S)
        assert plan.micro_batch * plan.accumulation * devices == plan.recipe.rows_per_step


@settings(max_examples=40)
@given(st.integers(4, 36), st.sampled_from(["H100", "MI300X", "RTX 4090", "8 x H100", "4 x A100"]))
def test_micro_batch_is_the_largest_power_of_two_that_fits_with_a_tenth_to_spare(depth, name):
    machine = named(name)
    plan = make_plan(Recipe.from_depth(depth), Execution(), machine)
    each = plan.recipe.rows_per_step // machine.count
    assert plan.micro_batch & (plan.micro_batch - 1) == 0
    assert each % plan.micro_batch == 0
    assert plan.fits == (plan.memory.total <= 0.9 * machine.memory)
    assert plan.fits or plan.micro_batch == 1
    double = 2 * plan.micro_batch
    if plan.fits and each % double == 0:
        more = estimate(plan.recipe.gpt_config(), double, kind="cuda", dtype="bfloat16")
        assert more.total > 0.9 * machine.memory


def test_every_device_holds_its_share_of_the_optimizer_state():
    one, eight = (make_plan(Recipe.from_depth(24), Execution(num_devices=n), H100S).memory for n in (1, 8))
    assert eight.optimizer == one.optimizer // 8
    assert (eight.weights, eight.gradients) == (one.weights, one.gradients)
    sharded = make_plan(Recipe.from_depth(24), Execution(num_devices=8, master="sharded"), H100S).memory
    assert (sharded.weights, sharded.gradients) == (one.weights // 2, one.gradients // 2)
    assert sharded.optimizer == (one.optimizer + one.weights) // 8


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        (Execution(micro_batch=3), "micro_batch=3 does not divide 64 rows a device: give 2"),
        (Execution(micro_batch=128), "does not divide 64 rows a device: give 64"),
        (Execution(num_devices=9), "give 8 or auto"),
        (Execution(num_devices=3), "can't be shared alike by 3 devices"),
        (Execution(dtype="float16", device="cpu"), "float16"),
    ],
)
def test_wishes_that_contradict_each_other_are_one_line(execution, said):
    with pytest.raises(UserError, match=said):
        make_plan(Recipe.from_depth(24), execution, H100S)


def test_promise_7_depth_24_on_a_cpu_is_refused_within_seconds():
    start = time.perf_counter()
    recipe, execution = build(24, "auto", "auto", 0, "", CPU)
    plan = make_plan(recipe, execution, CPU, cpu_flops=SLOW)
    assert time.perf_counter() - start < 10
    assert not plan.finishes
    assert plan.hours > 100
    with pytest.raises(UserError, match="24 h is the limit"):
        plan.check()
    for words in ("REFUSED", "depth ", "tokens=", "max_hours="):
        assert words in plan.refusal
    assert plan.refusal in plan.text()


def test_promise_7_what_does_not_fit_prints_the_ladder():
    plan = make_plan(Recipe.from_depth(40), Execution(), named("NVIDIA H100 80GB HBM3"))
    assert not plan.fits
    assert plan.micro_batch == 1
    for words in ("micro_batch=1", "recompute=1", "recompute=2", "master=none", "GB", "time x"):
        assert words in plan.refusal
    with pytest.raises(UserError, match="GB are needed, 72 GB may be taken"):
        plan.check()


def test_the_way_out_is_a_way_out():
    plan = make_plan(Recipe.from_depth(24, "laptop"), Execution(), CPU, cpu_flops=SLOW)
    depth = int(plan.ways_out[0].split()[1].rstrip(":"))
    assert make_plan(Recipe.from_depth(depth, "laptop"), Execution(), CPU, cpu_flops=SLOW).finishes
    assert not make_plan(Recipe.from_depth(depth + 1, "laptop"), Execution(), CPU, cpu_flops=SLOW).finishes
    fewer = next(way for way in plan.ways_out if way.startswith("tokens=")).split(":")[0]
    recipe, execution = build(24, "laptop", "auto", 0, fewer, CPU)
    assert make_plan(recipe, execution, CPU, cpu_flops=SLOW).hours == pytest.approx(24, rel=0.05)


def test_a_micro_batch_that_is_too_large_is_refused_with_the_one_that_fits():
    plan = make_plan(Recipe.from_depth(24), Execution(micro_batch=64), H100S)
    assert not plan.fits
    assert any("micro_batch=auto" in way for way in plan.ways_out)


def test_max_hours_holds_and_allows():
    recipe = Recipe.from_depth(24, "laptop")
    assert not make_plan(recipe, Execution(), CPU, cpu_flops=SLOW).finishes
    assert make_plan(recipe, Execution(max_hours=10_000), CPU, cpu_flops=SLOW).finishes
    # On an accelerator it ends a job of a chain cleanly, and a plan longer than one job is no fault.
    assert make_plan(Recipe.from_depth(24), Execution(max_hours=1), H100S).finishes


def test_no_time_limit_with_an_accelerator():
    plan = make_plan(Recipe.from_depth(24), Execution(), named("RTX 4090"))
    assert plan.hours > 100
    assert "hours" not in str(plan.problems)
    assert (
        make_plan(Recipe.from_depth(12), Execution(), Machine("mps", "Apple M3 Max", memory=96 * 10**9)).hours is None
    )


def test_a_resumed_run_is_planned_for_what_is_left():
    recipe = Recipe.from_depth(24)
    whole, half = (make_plan(recipe, Execution(), H100S, done_steps=done) for done in (0, recipe.steps // 2))
    assert half.hours == pytest.approx(whole.hours / 2, rel=1e-3)
    assert make_plan(recipe, Execution(), H100S, done_steps=recipe.steps).hours == 0


def test_passes_more_than_one_is_said_more_than_four_must_be_asked_for():
    recipe = Recipe.from_depth(4, "laptop", steps=700, batch_tokens=2048)
    tokens = recipe.tokens
    usual = {"cpu_flops": 1e11}
    assert "sees the same text again" not in make_plan(recipe, Execution(), CPU, data_tokens=2 * tokens, **usual).text()
    twice = make_plan(recipe, Execution(), CPU, data_tokens=tokens // 2, **usual)
    assert twice.finishes
    assert "sees the same text again" in " ".join(twice.text().split())
    many = make_plan(recipe, Execution(), CPU, data_tokens=tokens // 10, **usual)
    with pytest.raises(UserError, match=r"10\.0 passes over the data, and max_passes is 4: max_passes=1[01]"):
        many.check()
    assert make_plan(recipe, Execution(max_passes=11), CPU, data_tokens=tokens // 10, **usual).finishes


def test_the_embedded_corpus_is_never_used_for_more_than_40_passes():
    recipe = Recipe.from_depth(12, "full", data="embedded")
    plan = make_plan(recipe, Execution(max_passes=10_000), H100S)
    with pytest.raises(UserError, match="40 at most.*data=climbmix"):
        plan.check()


def test_json_holds_what_the_page_says():
    plan = make_plan(Recipe.from_depth(24, ratio=8), Execution(), H100S)
    numbers = json.loads(plan.to_json())
    assert numbers["recipe"] == plan.recipe.model_dump()
    assert sum(numbers["parameters"].values()) == 1_384_122_122
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "reserve")
    assert numbers["memory"]["total"] == sum(numbers["memory"][kind] for kind in kinds)
    assert numbers["micro_batch"] * numbers["accumulation"] * 8 == plan.recipe.rows_per_step
    assert numbers["hours"] == plan.hours
    assert numbers["finishes"] is True


def test_processes_on_one_cpu_share_its_memory():
    one, two = (
        make_plan(Recipe.from_depth(4, "laptop"), Execution(num_devices=n), CPU, cpu_flops=1e11) for n in (1, 2)
    )
    assert two.available == one.available // 2
    assert two.micro_batch == one.micro_batch // 2


@pytest.mark.parametrize(("name", "device"), [("8 x H100", "cuda:1"), ("8 x MI300X", "hip:3"), ("8 x MI300X", "hip:7")])
def test_t14_one_numbered_device_of_eight_can_be_planned_for(name, device):
    """Every caller narrows the machine to execution.device, some after another has: the number must survive that."""
    execution, machine = Execution(device=device), named(name)
    narrowed = select(machine, device)
    assert execution.world(machine) == execution.world(narrowed) == 1
    plan = make_plan(Recipe.from_depth(12), execution, machine)
    assert plan == make_plan(Recipe.from_depth(12), execution, narrowed)
    assert (plan.world, plan.machine.index) == (1, int(device.split(":")[1]))
    for given_machine in (machine, narrowed):
        assert choose_micro_batch(Recipe.from_depth(12), execution, given_machine) == plan.micro_batch


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_t15_processes_that_torchrun_started_share_the_rows(world):
    """`torchrun --nproc-per-node 2` on a CPU is not in the plan, where one process is the usual."""
    recipe = Recipe.from_depth(4, "laptop", sequence_len=256, batch_tokens=8 * 256)
    assert choose_micro_batch(recipe, Execution(), CPU, world) == 8 // world
    assert choose_micro_batch(recipe, Execution(micro_batch=1), CPU, world) == 1


def test_t15_rows_that_the_processes_cannot_share_are_refused():
    with pytest.raises(UserError, match="8 rows a step can't be shared alike by 3 devices: take 1"):
        choose_micro_batch(Recipe.from_depth(4, "laptop", sequence_len=256, batch_tokens=8 * 256), Execution(), CPU, 3)


@pytest.mark.parametrize(
    "dials",
    [
        {},
        {"steps": 2000},
        {"steps": 901, "data": "climbmix", "window": "L", "sequence_len": 512},
        {"batch_tokens": 8192, "vocab_size": 8192},
        {"head_dim": 32},
        {"n_layer": 12},
    ],
)
def test_the_way_out_keeps_what_else_was_asked_for(dials):
    recipe = Recipe.from_depth(20, "laptop", **dials)
    usual = {"execution": Execution(max_hours=2, max_passes=10**6), "machine": CPU, "cpu_flops": SLOW}
    plan = make_plan(recipe, **usual)
    found = re.fullmatch(r"depth (\d+)(?: with (.*))?: fits, and takes (.*)", plan.ways_out[0])
    this, next_one = (make_plan(Recipe.from_depth(int(found[1]) + i, "laptop", **dials), **usual) for i in (0, 1))
    assert this.hours <= 2 < next_one.hours
    assert page.duration(this.hours) == found[3]
    assert parse_overrides(found[2] or "") == dials


def test_no_smaller_depth_is_named_where_the_whole_shape_was_asked_for():
    recipe = Recipe.from_depth(20, "laptop", n_layer=40, n_embd=512, n_head=8, n_kv_head=2)
    plan = make_plan(recipe, Execution(max_hours=2), CPU, cpu_flops=SLOW)
    assert plan.ways_out
    assert not any(way.startswith("depth") for way in plan.ways_out)


def test_the_way_out_of_a_large_run_keeps_its_ratio():
    plan = make_plan(Recipe.from_depth(40, ratio=30.0), Execution(), named("H100"))
    assert " with ratio=30.0: fits" in plan.ways_out[0]


def test_a_bound_on_disk_holds_in_the_plan_and_is_said():
    recipe = Recipe.from_depth(12, data="climbmix", vocab_size=32_768)
    free, held = (
        make_plan(recipe, Execution(disk_gb=gb, price=1.0, peak_tflops=100.0), named("H100"), mfu=0.5) for gb in (0, 1)
    )
    corpus = free.data.download + free.data.token_shards
    assert corpus > 1e9
    assert free.numbers()["disk"]["total"] - held.numbers()["disk"]["total"] == corpus - 1e9
    assert "of both at most" in held.text()
    assert "of both at most" not in free.text()
