"""Notebook 07 as a person starts it: papermill's own command, headless, in a folder of its own, without network."""

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from nanolearn.lab import check
from nanolearn.recipe import Recipe
from nanolearn.train import records
from tests.local_server import Hub, serving

NOTEBOOK = "notebooks/07_pretrain.ipynb"
TINY = "steps=4 batch_tokens=512 micro_batch=2 sequence_len=128 vocab_size=300 n_embd=64 head_dim=32 val_every=2"
WORDS = [
    start + end for start in ("st", "l", "p", "w", "th", "r", "c") for end in ("ate", "aw", "ear", "ing", "o", "y")
]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Sixty short texts: enough that the split by hash leaves some on both sides."""
    folder, draw = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for number in range(60):
        words = draw.choices(WORDS, k=draw.randrange(40, 200))
        (folder / f"{number:02d}.txt").write_text(" ".join(words) + ".")
    return folder


def papermill(root: Path, out: Path, *parameters: str, **environment: str) -> subprocess.CompletedProcess:
    """`papermill notebooks/07_pretrain.ipynb out.ipynb ...`, run from the checkout."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", NOTEBOOK, str(out), *parameters]
    return subprocess.run(command, cwd=root, env=os.environ | environment, capture_output=True, text=True, timeout=280)


def parameters(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in ("-p", name, str(value))]


def outputs(path: Path) -> str:
    """Everything printed in an executed notebook."""
    cells = nbformat.read(path, as_version=4).cells
    found = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("evalue") or "" for output in found)


def test_papermill_itself_reads_every_parameter_with_its_type_and_help(root):
    from papermill.inspection import inspect_notebook

    found = inspect_notebook(str(root / NOTEBOOK))
    assert {name: entry["inferred_type_name"] for name, entry in found.items()} == {
        "depth": "int",
        "preset": "str",
        "data": "str",
        "run_dir": "str",
        "seed": "int",
        "resume": "bool",
        "rehearsal": "bool",
        "overrides": "str",
    }
    assert all(entry["help"] for entry in found.values())


@pytest.mark.slow
def test_n1_an_unknown_parameter_stops_papermill_and_names_the_nearest(root, tmp_path):
    done = papermill(root, tmp_path / "out.ipynb", *parameters(dept=24))
    assert done.returncode != 0
    assert "UserError: unknown parameter 'dept': did you mean 'depth'?" in done.stderr


@pytest.mark.slow
def test_depth_24_without_an_accelerator_stops_with_plan_estimate_and_ways_out(root, tmp_path, monkeypatch):
    """At most 30 s: of processor time, so that a busy machine fails nothing. Nothing is fetched or written."""
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("NANOLEARN_CACHE", str(tmp_path / "cache"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = papermill(root, tmp_path / "out.ipynb", *parameters(depth=24), CUDA_VISIBLE_DEVICES="")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 30
    assert done.returncode != 0
    assert "UserError: about" in done.stderr
    page = outputs(tmp_path / "out.ipynb")
    assert "24 layers" in page
    assert "REFUSED" in page
    assert "Ways out" in page
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_the_whole_notebook_runs_headless_then_reports_then_starts_again(root, tmp_path, corpus, monkeypatch):
    """One run; the same command again (a report: nothing is trained); resume=False (moved aside, nothing lost)."""
    runs, out = tmp_path / "runs", tmp_path / "out.ipynb"
    monkeypatch.setenv("NANOLEARN_RUNS", str(runs))
    given = parameters(depth=1, data=corpus, overrides=TINY)
    first = papermill(root, out, *given)
    assert first.returncode == 0, first.stderr
    notebook = nbformat.read(out, as_version=4)
    assert check.run_faults(notebook) == []
    assert 3 <= check.figures(notebook) <= 4
    latest = json.loads((runs / "latest.json").read_text())
    folder = Path(latest["run_dir"])
    result = json.loads((folder / "result.json").read_text())
    assert result["complete"]
    assert result["steps"] == 4
    assert result["notebook"]["name"] == latest["notebook"] == "07_pretrain"
    assert result["notebook"]["same_after_loading"]
    history = (folder / records.NAME).read_bytes()
    again = papermill(root, out, *given)
    assert again.returncode == 0, again.stderr
    assert "nothing will be trained" in outputs(out)
    assert check.run_faults(nbformat.read(out, as_version=4)) == []
    assert (folder / records.NAME).read_bytes() == history
    afresh = papermill(root, out, *given, *parameters(resume=False))
    assert afresh.returncode == 0, afresh.stderr
    assert "is now in" in outputs(out)
    aside = [path for path in runs.iterdir() if path.name.startswith(f"{folder.name}.")]
    assert [(path / records.NAME).read_bytes() for path in aside] == [history]


@pytest.mark.slow
def test_a_run_that_was_stopped_is_reported_as_far_as_it_came(root, tmp_path, corpus, monkeypatch):
    """Its samples are older than its newest checkpoint, or there are none: nothing to compare, and no failure."""
    runs, out = tmp_path / "runs", tmp_path / "out.ipynb"
    monkeypatch.setenv("NANOLEARN_RUNS", str(runs))
    done = papermill(root, out, *parameters(depth=1, data=corpus, overrides=f"{TINY} max_hours=0.001"))
    assert done.returncode == 0, done.stderr
    assert check.run_faults(nbformat.read(out, as_version=4)) == []
    assert "the run was stopped" in outputs(out)
    result = json.loads((Path(json.loads((runs / "latest.json").read_text())["run_dir"]) / "result.json").read_text())
    assert not result["complete"]
    assert result["notebook"]["same_after_loading"] is None


@pytest.mark.slow
def test_a_rehearsal_walks_the_whole_path_at_full_width(root, tmp_path, corpus, monkeypatch):
    runs, out = tmp_path / "runs", tmp_path / "out.ipynb"
    monkeypatch.setenv("NANOLEARN_RUNS", str(runs))
    wishes = "sequence_len=128 batch_tokens=1024 vocab_size=300 n_embd=64 head_dim=32"
    done = papermill(root, out, *parameters(depth=6, data=corpus, overrides=wishes, rehearsal=True))
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads((runs / "latest.json").read_text())["run_dir"])
    assert folder.name.startswith("rehearsal-")
    recipe = Recipe.load(folder / "recipe.json")
    assert (recipe.depth, recipe.n_layer, recipe.n_embd, recipe.steps, recipe.rows_per_step) == (6, 4, 64, 2, 1)
    result = json.loads((folder / "result.json").read_text())
    assert result["bpb"] is not None
    assert result["notebook"]["same_after_loading"]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["8 x NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"])
def test_the_full_scale_command_runs_up_to_the_launch(root, tmp_path, monkeypatch, machine):
    """The literal `-p depth 24`, on simulated devices; the Hub is a server here that lists shards and gives none."""
    runs, out = tmp_path / "runs", tmp_path / "out.ipynb"
    monkeypatch.setenv("NANOLEARN_RUNS", str(runs))
    hub = Hub()
    hub.datasets["karpathy/climbmix-400b-shuffle"] = {f"shard_{i:05d}.parquet": b"" for i in (0, 1, 6542)}
    with serving(hub):
        done = papermill(root, out, "-p", "depth", "24", NANOLEARN_SIMULATE=machine, HF_ENDPOINT=hub.url)
    assert done.returncode != 0
    assert "everything up to the launch was done" in done.stderr
    page = outputs(out)
    for said in (f"{machine} (simulated)", "preset full", "data climbmix", "1,384,122,122", "8,352 steps of 1,048,576"):
        assert said in page
    (folder,) = [path for path in runs.iterdir() if path.is_dir()]
    assert Recipe.load(folder / "recipe.json") == Recipe.from_depth(24)
    assert json.loads((folder / "execution.json").read_text())["num_devices"] == "auto"
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


@pytest.mark.slow
def test_a_large_corpus_that_cannot_be_reached_is_refused_in_one_line(root, tmp_path):
    done = papermill(
        root,
        tmp_path / "out.ipynb",
        *parameters(depth=24),
        NANOLEARN_SIMULATE="8 x NVIDIA H100 80GB HBM3",
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert done.returncode != 0
    assert "UserError: " in done.stderr
    assert "check the network" in done.stderr
