"""The page: every figure that a person was promised, and units that they can read."""

import json

import pytest

from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named
from nanolearn.plan import make_plan
from nanolearn.plan.page import WIDTH, duration, render, significant, size
from nanolearn.recipe import Recipe

CPU = Machine("cpu", "a processor", memory=16 * 10**9)


def test_the_page_of_depth_24_says_everything():
    text = make_plan(Recipe.from_depth(24, ratio=8), Execution(), named("8 x NVIDIA H100 80GB HBM3")).text()
    for words in (
        "1,384,122,122 = token table 50,331,648 + value tables 603,979,776 + head 50,331,648",
        "matrices 679,478,976",
        "5,838,471,168 tokens (8 a weight",
        "5,568 steps of 1,048,576",
        "micro_batch 16 x devices 8 x accumulation 4",
        "4.775e+09 a token",
        "of 72 GB a device: weights 5.54 GB, gradients 5.54 GB, optimizer state 1.04 GB",
        "1.96 h at 829,000 tokens/s",
        "50.0% of 989.4 TFLOP/s",
        "$3.50 for a device and hour (stated, not quoted today",
        "at most 9.7 GB",
        "3 checkpoints of 13.9 GB",
        "passes over it",
        "tokenising",
        "bfloat16 (capability 9.0",
    ):
        assert words in " ".join(text.split()), words
    assert "REFUSED" not in text


def test_windows_that_are_all_full_are_said_to_be():
    short = make_plan(Recipe.from_depth(4, "laptop", sequence_len=128), Execution(), CPU, cpu_flops=1e11).text()
    long = make_plan(Recipe.from_depth(4, "laptop", sequence_len=256), Execution(), CPU, cpu_flops=1e11).text()
    assert "windows SSSL (all full: rows of 128)" in " ".join(short.split())
    assert "all full" not in long


def test_lines_fit_and_numbers_keep_their_units():
    for recipe, machine in ((Recipe.from_depth(40), named("H100")), (Recipe.from_depth(4, "laptop"), CPU)):
        lines = make_plan(recipe, Execution(), machine, cpu_flops=1e11).text().splitlines()
        assert max(map(len, lines)) <= WIDTH + 10
        assert not any(line.strip().startswith(("GB", "MB")) for line in lines)


def test_what_is_simulated_or_unknown_says_so():
    simulated = Machine("cuda", "a new card", memory=80 * 10**9, capability=(9, 0), simulated=True)
    text = make_plan(Recipe.from_depth(4), Execution(), simulated).text()
    assert "a new card (simulated)" in text
    assert "unknown, without validation" in text
    assert "give price=DOLLARS" in text
    assert "0.0%" not in text


@pytest.mark.parametrize(
    "passes, disk_gb, again", [(3.0, 20, True), (3.0, 0, False), (0.5, 20, False), (3.0, 999, False)]
)
def test_what_disk_gb_drops_is_fetched_again_in_each_pass(passes, disk_gb, again):
    numbers = json.loads(make_plan(Recipe.from_depth(24), Execution(), named("8 x H100")).to_json())
    numbers["data"]["passes"], numbers["execution"]["disk_gb"] = passes, disk_gb
    assert ("in each pass, since disk_gb drops" in " ".join(render(numbers).split())) == again


def test_a_page_can_be_made_from_the_json():
    plan = make_plan(Recipe.from_depth(4, "laptop"), Execution(), CPU, cpu_flops=1e11)
    assert render(json.loads(plan.to_json())) == plan.text()


@pytest.mark.parametrize(
    ("hours", "said"),
    [(None, "unknown"), (0.0, "0 s"), (0.01, "36 s"), (0.5, "30 min"), (24.4, "24.4 h"), (192, "192 h (8.0 days)")],
)
def test_durations(hours, said):
    assert duration(hours) == said


def test_numbers():
    assert (significant(999_999), significant(0), size(0), size(999)) == ("1,000,000", "0", "0 MB", "0.000999 MB")
