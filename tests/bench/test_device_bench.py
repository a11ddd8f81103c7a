"""bench/device.py: it runs where only torch and numpy are, and what is wrong is found before it is timed."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from nanolearn.model.attention import attend
from nanolearn.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
MODULES = {"pyyaml": "yaml", "ipython": "IPython", "jupyterlab-myst": "jupyterlab_myst"}

WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        # What a package that is not installed looks like, also to those who only ask.
        return None if name.split(".")[0] in {refused} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.argv = {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def bench_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def refused() -> set[str]:
    """The modules of every dependency but torch and numpy, without what torch itself brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    brought = {Requirement(text).name.lower() for text in metadata.requires("torch") or []}  # filelock, for compiling
    names = {Requirement(text).name.lower() for text in listed} - {"torch", "numpy"} - brought
    return {MODULES.get(name, name.replace("-", "_")) for name in names} | {"google", "pandas", "scipy", "einops"}


@pytest.mark.slow
def test_the_whole_script_runs_where_only_torch_and_numpy_are(tmp_path):
    argv = [str(BENCH / "device.py"), "--tiny", "--out", str(tmp_path)]
    assert {"pydantic", "rustbpe", "tiktoken", "pyarrow", "psutil", "tqdm", "safetensors", "matplotlib"} <= refused()
    code = WITHOUT.format(refused=sorted(refused()), argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "device-tiny.json").read_text())
    assert set(record) == {"date", "command", "machine", "figures"}
    figures = record["figures"]
    assert [said["wrong"] for said in figures["checks"].values()] == [[], [], []]
    lines = figures["lines"]
    assert not [line for line in lines if "failed" in line]
    assert [(line["depth"], line["compiled"]) for line in lines] == [(2, False)] * 3 + [(1, False)] * 3 + [(2, True)]
    # A CPU has no published peak: its MFU is left open, never 0.
    assert all(line["tokens_per_second"] > 0 and line["mfu_canonical"] is None for line in lines)
    assert all(0 <= line["stall_share"] < 0.5 and line["first_step_seconds"] > 0 for line in lines)
    assert "blocked, compiled" in done.stdout or "sdpa, compiled" in done.stdout


def test_a_window_that_is_off_by_one_is_found_before_anything_is_timed():
    from device import TINY, Way, check

    wide = Way("off by one", "SSSL", lambda q, k, v, window: attend(q, k, v, window + 1))
    wrong = check(wide, TINY, "cpu")["wrong"]
    assert any(fault.startswith("float32 attention") for fault in wrong)


def test_attention_that_sees_the_future_is_wrong_in_every_comparison():
    from device import TINY, Way, check

    def everything(q, k, v, window):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    assert len(check(Way("all", "SSSL", everything), TINY, "cpu")["wrong"]) == 4


@pytest.mark.parametrize("fit, used, rows", [(4, 0.5, 4), (64, 0.5, 16), (64, 0.9, 1), (0, 0.5, 0)])
def test_rows_grow_until_memory_ends_or_is_nearly_used(fit, used, rows):
    from device import fitting_rows

    trial = SimpleNamespace(once=lambda n: 1.0 if n <= fit else None, used=lambda: used)
    assert fitting_rows(trial, 16, float("inf")) == (rows, 1.0 if rows else 0.0)


def test_the_memory_of_the_configuration_before_does_not_end_the_search(monkeypatch):
    import device

    peak = 0  # as torch counts: the highest since the last reset, over all that the process did

    def step(self, batch):
        nonlocal peak
        if (rows := batch.inputs.size(0)) > 64:
            raise torch.OutOfMemoryError
        peak = max(peak, 26 + rows)

    def reset(*_):
        nonlocal peak
        peak = 0

    read_ahead = device.Prefetcher
    monkeypatch.setattr(device, "Prefetcher", lambda rows, _: read_ahead(rows, torch.device("cpu")))
    monkeypatch.setattr(device.Trial, "step", step)
    monkeypatch.setattr(device.Trial, "wait", lambda self: None)
    monkeypatch.setattr(device.Trial, "__init__", lambda self: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: peak)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    found = []
    for _ in ("depth 24", "depth 12"):
        trial = device.Trial()
        trial.device, trial.config = SimpleNamespace(type="cuda"), SimpleNamespace(sequence_len=4, vocab_size=64)
        found.append(device.fitting_rows(trial, 128, float("inf"))[0])
    assert found == [64, 64]


def test_the_best_line_is_one_of_the_model_with_windows():
    from device import best, present

    def line(way: str, speed: float) -> dict:
        return {"way": way, "depth": 24, "rows": 1, "tokens_per_second": speed}

    failed = {"way": "blocked", "depth": 24, "failed": "out of memory"}
    lines = [failed, line("sdpa", 5.0), line("blocked", 7.0), line("no windows", 9.0)]
    assert best(lines, 24, present("cpu"))["tokens_per_second"] == 7.0
    assert best(lines, 12, present("cpu")) is None


def test_every_kernel_that_is_here_is_tried_on_a_gpu_and_none_is_downloaded(monkeypatch):
    import device

    there = {"flash3": "kernels", "flash2": "torch.nn.attention.varlen", "flex": "triton"}
    monkeypatch.setattr(device, "source", there.get)
    names = [way.name for way in device.present("cuda")]
    assert names == ["flash2", "flex", "blocked", "sdpa", "no windows"]
    assert device.present("cuda")[0].dtypes == (torch.bfloat16,)  # what FlashAttention takes


def test_a_kernel_that_does_not_load_is_a_finding(monkeypatch, tmp_path):
    import device

    def broken(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(device, "present", lambda _: (device.Way("flash2", "SSSL", broken),))
    report = device.Report(tmp_path, "x", "", {"device": "x", "torch": "", "peak_tflops": None})
    device.go(report, device.TINY, "cpu", None)
    assert report.checks["flash2"]["wrong"] == ["RuntimeError: no kernel image is available"]
    assert not report.lines


def test_without_an_accelerator_the_script_says_what_to_do(monkeypatch, capsys):
    from device import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "--tiny" in capsys.readouterr().out


def test_the_speed_is_that_of_a_run_whose_updates_are_rare(monkeypatch):
    import device

    now, waited = 0.0, 0.25  # seconds

    def step(self, batch):
        nonlocal now
        now += 1.0 + waited
        return waited

    monkeypatch.setattr(device.time, "perf_counter", lambda: now)
    monkeypatch.setattr(device.Trial, "__init__", lambda self: None)
    monkeypatch.setattr(device.Trial, "step", step)
    trial = device.Trial()
    trial.device, trial.config = torch.device("cpu"), SimpleNamespace(sequence_len=8, vocab_size=64)
    line = trial.timed(rows=2, seconds=10.0, batch_tokens=64)
    assert line["seconds_an_update"] == waited
    assert line["tokens_per_second"] == 64 / (4 * 1.0 + waited)
    assert trial.timed(rows=2, seconds=10.0, batch_tokens=1)["tokens_per_second"] == 16 / 1.25


def test_its_batches_are_those_of_the_full_recipe():
    from device import FULL

    assert FULL.batches == {depth: Recipe.from_depth(depth).batch_tokens for depth in FULL.depths}
