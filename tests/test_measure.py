"""Measurements end to end on this machine's CPU with small buffers, and their verdicts for machines put before them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolearn import measure
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import cpu, named
from nanolearn.recipe import Recipe
from tests.local_server import Hub, serving


@pytest.mark.slow
def test_all_of_it_on_a_cpu():
    checks = list(measure.examine(Recipe.from_depth(4, "laptop"), Execution(), cpu(), small=True))
    names = ["builds", "matrices", "all-reduce", "cache disk", "runs disk", "tokenizer", "this run"]
    assert [check.name for check in checks] == names
    assert all(not check.remedy for check in checks)
    found = {check.name: check.found for check in checks}
    assert "over 2 processes (gloo" in found["all-reduce"]
    assert "GFLOP/s" in found["this run"]  # the plan rests on what was just measured


def test_what_is_simulated_is_not_measured(monkeypatch):
    monkeypatch.setenv("NANOLEARN_SIMULATE", "H100")
    from nanolearn.hardware import detect

    with pytest.raises(UserError, match="H100 .simulated. can't be measured: unset NANOLEARN_SIMULATE"):
        next(measure.examine(Recipe.from_depth(4), Execution(), detect()))


@given(st.lists(st.floats(0.96e15, 1e15), min_size=1, max_size=16))
def test_devices_that_are_alike_are_well(rates):
    assert not measure.spread(rates).remedy


@given(st.integers(0, 7))
def test_the_slow_one_is_named(which):
    rates = [700e12] * 8
    rates[which] = 600e12
    assert measure.spread(rates).remedy.startswith(f"device {which} is slow (600.0 TFLOP/s): look")


@pytest.mark.parametrize(
    ("cuda", "hip", "driver", "rocm", "remedy"),
    [
        ("12.8", None, "12.8", "", ""),
        ("12.8", None, "13.0", "", ""),
        ("13.0", None, "12.8", "", "takes CUDA 12.8 at most"),
        ("12.8", None, "", "", ""),
        (None, "6.4.43482", "", "7.2.0", "built for ROCm 7"),
        (None, "7.0.1", "", "7.2.0", ""),
        (None, None, "12.8", "", ""),
    ],
)
def test_a_wheel_beside_driver_and_system(cuda, hip, driver, rocm, remedy):
    assert remedy in measure.builds(cuda, hip, driver, rocm).remedy
    assert bool(measure.builds(cuda, hip, driver, rocm).remedy) == bool(remedy)


def test_hours_and_dollars_and_the_bound_that_matrices_set():
    said = measure.verdict(Recipe.from_depth(24, ratio=8), Execution(), named("8 x H100"), 700e12).found
    assert "1.96 h, $55" in said
    assert "matrices alone reach 71% of the peak" in said
    assert "refused" not in said


def test_the_hub_is_read_and_its_refusal_is_a_line(monkeypatch):
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.datasets["karpathy/climbmix-400b-shuffle"] = {"shard_06542.parquet": bytes(100_000)}
        assert "MB/s from karpathy/climbmix-400b-shuffle (0 MB" in measure.hub_rate(50_000).found
        del hub.datasets["karpathy/climbmix-400b-shuffle"]
        assert "can't be read" in measure.hub_rate(50_000).found
