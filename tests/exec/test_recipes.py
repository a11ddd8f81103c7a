"""Every parameter file is one that the notebook takes and its device can run; its comment says what the plan says."""

import re
from pathlib import Path

import pytest
import yaml

from nanolearn.hardware import Machine, cpu, named
from nanolearn.lab import params
from nanolearn.plan import make_plan
from nanolearn.recipe import build
from tests.local_server import Hub, serving
from tests.notebooks.test_pretrain_notebook import outputs, papermill

RECIPES = Path(__file__).parents[2] / "exec" / "recipes"
NAMES = ["laptop", "rtx4090", "colab-t4", "mps", "h100x1", "h100x8", "h200x8", "mi300x-x1", "mi300x-x8", "b200x8"]
TYPES = {"depth": int, "preset": str, "data": str, "run_dir": str, "seed": int, "overrides": str}


def path(name: str) -> Path:
    return RECIPES / f"07_pretrain.{name}.yaml"


def machine(name: str) -> Machine:
    """The device that the first line of a file names."""
    said = path(name).read_text().splitlines()[0].removeprefix("# ")
    if said == "a CPU":
        return cpu()
    return Machine("mps", said, memory=32 * 10**9) if said.startswith("Apple") else named(said)


def test_there_is_one_for_each_device():
    assert {file.name for file in RECIPES.glob("*.yaml")} == {path(name).name for name in [*NAMES, "speedrun"]}


@pytest.mark.parametrize("name", [*NAMES, "speedrun"])
def test_it_resolves_to_a_plan_that_fits_its_device(name):
    wishes = yaml.safe_load(path(name).read_text())
    device = machine(name)
    settings = {"data": "auto", "seed": 0, "overrides": ""} | wishes
    recipe, execution = build(
        **{n: settings[n] for n in ("depth", "preset", "data", "seed", "overrides")}, machine=device
    )
    plan = make_plan(recipe, execution, device, cpu_flops=1e11 if device.type == "cpu" else 1e13)
    assert plan.fits, plan.problems
    assert plan.finishes, plan.problems
    assert plan.problems == ()
    if device.type == "cuda":
        text = " ".join(line.removeprefix("# ") for line in path(name).read_text().splitlines())
        hours, need, free = map(float, re.search(r"not measured\): ([\d.]+) hours, (\d+) of (\d+) GB", text).groups())
        assert plan.hours == pytest.approx(hours, rel=0.02)
        assert plan.memory.total / 1e9 == pytest.approx(need, abs=1.5)
        assert plan.available / 1e9 == pytest.approx(free, abs=1.5)
        assert {"micro_batch", "recompute"} <= {word.split("=")[0] for word in wishes["overrides"].split()}


@pytest.mark.parametrize("name", [*NAMES, "speedrun"])
def test_the_notebook_declares_every_parameter(name, root):
    cells = (root / "book" / "chapters" / "07_pretrain.md").read_text().split("```{code-cell} ipython3")
    declared = params.declaration(
        [cell.split("```")[0].split("\n\n", 1)[1] for cell in cells if ":tags: [parameters]" in cell]
    )
    wishes = yaml.safe_load(path(name).read_text())
    assert set(wishes) <= set(declared)
    assert all(type(value) is TYPES[parameter] for parameter, value in wishes.items())


def test_the_known_runs():
    def recipe(name: str):
        wishes = yaml.safe_load(path(name).read_text())
        return build(wishes["depth"], wishes["preset"], "auto", 0, wishes["overrides"], machine(name))[0]

    assert (recipe("speedrun").steps, recipe("speedrun").batch_tokens) == (5568, 2**20)
    published = recipe("mi300x-x1")
    assert (published.steps, published.batch_tokens, published.window) == (29_000, 524_288, "L")
    assert published.decay == pytest.approx(0.0243, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100x8", "speedrun", "mi300x-x1"])
def test_papermill_takes_the_file_and_the_notebook_goes_up_to_the_launch(name, root, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path / "runs"))
    hub, out = Hub(), tmp_path / "out.ipynb"
    hub.datasets["karpathy/climbmix-400b-shuffle"] = {f"shard_{i:05d}.parquet": b"" for i in (0, 1, 6542)}
    with serving(hub):
        simulated = {"NANOLEARN_SIMULATE": machine(name).label, "HF_ENDPOINT": hub.url}
        done = papermill(root, out, "-f", str(path(name)), **simulated)
    assert "everything up to the launch was done" in done.stderr
    assert "1,384,122,122" in outputs(out)
