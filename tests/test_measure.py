"""Measurements end to end on this machine's CPU with small buffers, and their verdicts for machines put before them."""

import psutil
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


@pytest.mark.parametrize(("rate", "hours"), [(700e12, 1.96), (300e12, 3.23), (100e12, 9.68)])
def test_a_run_is_no_faster_than_the_slowest_device_multiplies(rate, hours):
    # 4.7752e9 FLOP for each of 5.838e9 tokens on 8 devices, at 50% of the peak or at what was measured.
    counted = 4.7752e9 * 5_838_471_168 / 8 / min(rate, 0.5 * 989.4e12) / 3600
    assert counted == pytest.approx(hours, abs=0.01)
    found = measure.verdict(Recipe.from_depth(24, ratio=8), Execution(), named("8 x H100"), rate).found
    assert f": {hours} h" in found


def test_the_peak_that_a_user_gives_is_the_one_that_is_told():
    execution = Execution(peak_tflops=1400)
    found = measure.verdict(Recipe.from_depth(24, ratio=8), execution, named("8 x H100"), 700e12).found
    assert "matrices alone reach 50% of the peak" in found


def test_a_folder_that_cant_be_written_is_a_line_and_the_page_goes_on(tmp_path):
    (tmp_path / "file").touch()
    check = measure.tried("runs disk", lambda: measure.disk("runs", tmp_path / "file" / "x", 1 << 20), "set it")
    assert check.found.startswith("not measured: ")
    assert check.remedy == "set it"


def test_a_slow_disk_is_left_after_its_time(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(measure, "DISK_SECONDS", 0.0)
    monkeypatch.setattr(measure.os, "fsync", synced.append)
    assert "MB/s written" in measure.disk("runs", tmp_path, 256 << 20).found
    assert len(synced) == 2  # after the first 16 MiB, and at the end


@pytest.mark.slow
def test_a_link_that_hangs_is_left_and_no_process_stays(monkeypatch):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="no answer from all 2 processes in 0 s"):
        measure.reduce_rate(2, "cpu", 64 << 20, seconds=0.0)
    gone, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=10)
    assert not [one for one in alive if "spawn_main" in " ".join(one.cmdline())]


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
