"""The ladder: what each rung saves and costs, and that it stops where a run fits."""

import pytest

from nanolearn.plan import memory
from nanolearn.plan.ladder import climb
from nanolearn.recipe import Recipe

D24 = Recipe.from_depth(24)


def test_every_rung_is_there_with_memory_and_slowdown():
    rungs = climb(D24, "cuda", "bfloat16", 10**9, rows=16)
    names = [rung.ask.split("=")[0] for rung in rungs]
    assert names[:4] == ["micro_batch", "recompute", "recompute", "master"]
    assert names[4:] == ["sequence_len"] * len(names[4:])
    sizes = [rung.memory for rung in rungs]
    assert sizes == sorted(sizes, reverse=True)
    assert not any(rung.fits for rung in rungs)
    assert all(rung.slowdown > 0.9 for rung in rungs)


def test_no_worse_model_where_a_better_one_fits():
    rungs = climb(D24, "cuda", "bfloat16", 40 * 10**9, rows=16)
    assert rungs[-1].ask == "master=none"
    assert rungs[0].fits


def test_recomputation_costs_its_share_of_the_forward():
    """Recompute 2 repeats the blocks' forward, a third of their work; recompute 1 a third of that: the MLP's first."""
    rungs = {rung.ask: rung for rung in climb(D24, "cuda", "bfloat16", 10**9, rows=1)}
    base = rungs["micro_batch=1"].slowdown
    assert base == pytest.approx(1.0)
    assert rungs["recompute=1"].slowdown == pytest.approx(1 + 2 * 24 * 4 * 1536**2 / 4.7752e9, rel=1e-4)
    assert 1.28 < rungs["recompute=2"].slowdown < 1.34


def test_sharded_masters_come_before_none_and_only_where_there_are_shards():
    asked = [rung.ask for rung in climb(D24, "cuda", "bfloat16", 10**9, rows=16, world=8)]
    assert asked[3:5] == ["master=sharded", "master=none"]
    assert "master=sharded" not in [rung.ask for rung in climb(D24, "cuda", "bfloat16", 10**9, rows=16)]
    assert not [rung.ask for rung in climb(D24, "cpu", "float32", 10**9, rows=16, world=8) if "master" in rung.ask]


def test_a_rung_needs_what_the_plan_would_then_count():
    rungs = {rung.ask: rung for rung in climb(D24, "cuda", "bfloat16", 10**9, rows=16)}
    options = {"kind": "cuda", "dtype": "bfloat16"}
    assert rungs["micro_batch=1"].memory == memory.estimate(D24.gpt_config(), 1, **options).total
    shorter = Recipe.from_depth(24, sequence_len=1024).gpt_config()
    last = memory.estimate(shorter, 1, **options, recompute="2", master="none").total
    assert rungs.get("sequence_len=1024", rungs["master=none"]).memory in (last, rungs["master=none"].memory)
