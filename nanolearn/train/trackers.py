"""The records of a run in a viewer that people know: TensorBoard, MLflow, trackio or Weights & Biases.

Each is a few lines behind the same record that goes into `records.jsonl`, so none of them knows more than that file,
and the file needs none of them. A tracked run belongs to its run directory: a resume goes on in it, and does not tell
again what was told before (promise 2: it would be the same numbers). Only TensorBoard is told again, since it keeps
points in memory for a while, which a kill loses; it forgets its points after a resume by itself.
"""

import importlib.util
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanolearn.errors import UserError
from nanolearn.fetch import replacing
from nanolearn.recipe import Recipe
from nanolearn.train.records import ASIDE, NAME, parsed

FILE, PROJECT = "tracker.json", "nanolearn"
SCALARS = ("loss", "grad_norm", "loss_z", "norm_z", "rate", "tokens_per_second", "mfu", "stall", "memory")
# Each tracker's modules, and what pip calls their packages.
MODULES = {
    "none": {},
    "tensorboard": {"tensorboard": "tensorboard"},
    "mlflow": {"mlflow": "mlflow-skinny", "sqlalchemy": "sqlalchemy", "alembic": "alembic"},
    "trackio": {"trackio": "trackio"},
    "wandb": {"wandb": "wandb"},
}


def check(name: str) -> None:
    """Raises UserError where a tracker's package is missing; imports nothing.

    >>> check("none")

    Taught in chapter 07_pretrain.
    """
    for module, package in MODULES[name].items():
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"tracker={name} needs the package {package}", f"pip install {' '.join(MODULES[name].values())}"
            )


class Tracker:
    """An observer of records: numbers of steps and validations, and samples as text, all by step.

    `told` is, by kind of record, the last step that was told before. Taught in chapter 07_pretrain.
    """

    def __init__(self, told: Mapping[str, int]) -> None:
        self.told, self.complete = told, False

    def __call__(self, record: dict) -> None:
        kind, step = record.get("kind", ""), record.get("step", 0)
        if kind == "end":
            self.complete = record["stopped"] == "complete"
        if step <= self.told.get(kind, -1):
            return
        if kind == "step":
            self.numbers({name: record[name] for name in SCALARS if record.get(name) is not None}, step)
        elif kind == "validation":
            self.numbers({"validation_bpb": record["bpb"]}, step)
        elif kind == "sample":
            self.text(record["prompt"], record["text"], step)
        elif kind == "checkpoint":
            self.flush()

    def numbers(self, values: dict[str, float], step: int) -> None:
        """Points of curves; what has no value (a loss that was not finite) is left out."""
        raise NotImplementedError

    def text(self, prompt: str, text: str, step: int) -> None:
        """A sample."""
        raise NotImplementedError

    def flush(self) -> None:
        """A resume may begin here: keep what was told so far."""

    def close(self) -> None:
        """Keep everything, and say how the run ended."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in RUN_DIR/tensorboard: `tensorboard --logdir runs` shows them."""

    def __init__(self, module: Any, run_dir: Path, recipe: Recipe, run: str, step: int) -> None:
        super().__init__({})
        self.writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)
        self.writer.add_text("recipe", f"```json\n{recipe.model_dump_json(indent=1)}\n```", step)

    def numbers(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)  # as fp32

    def text(self, prompt: str, text: str, step: int) -> None:
        self.writer.add_text(f"sample/{prompt or 'no prompt'}", prompt + text, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class MLflow(Tracker):
    """An SQLite store in the run directory: `mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db` shows it."""

    def __init__(self, module: Any, run_dir: Path, recipe: Recipe, run: str, told: Mapping[str, int]) -> None:
        super().__init__(told)
        self.entities = importlib.import_module("mlflow.entities")
        self.client = module.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
        found = self.client.get_experiment_by_name(PROJECT)
        place = (run_dir / "mlflow").as_uri()
        experiment = found.experiment_id if found else self.client.create_experiment(PROJECT, artifact_location=place)
        # Its ids are its own: ours is a tag.
        runs = self.client.search_runs([experiment], f"tags.run = '{run}'")
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self.client.create_run(experiment, tags={"run": run}, run_name=recipe.name).info.run_id
            settings = recipe.model_dump().items()
            self.client.log_batch(self.id, params=[self.entities.Param(name, str(value)) for name, value in settings])

    def numbers(self, values: dict[str, float], step: int) -> None:
        metrics = [self.entities.Metric(name, float(value), 0, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def text(self, prompt: str, text: str, step: int) -> None:
        name = "".join(letter if letter.isalnum() else "-" for letter in prompt) or "no-prompt"
        self.client.log_text(self.id, prompt + text, f"samples/{step:08d}-{name}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.id, "FINISHED" if self.complete else "KILLED")


class Logged(Tracker):
    """trackio, and Weights & Biases, whose interface it copies. W&B heeds WANDB_MODE=offline by itself."""

    def __init__(self, run: Any, told: Mapping[str, int]) -> None:
        super().__init__(told)
        self.run = run

    def numbers(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def text(self, prompt: str, text: str, step: int) -> None:
        self.run.log({f"sample/{prompt or 'no prompt'}": prompt + text}, step=step)

    def close(self) -> None:
        self.run.finish()


def open_trackers(name: str, run_dir: Path, recipe: Recipe, step: int) -> tuple[Tracker, ...]:
    """The tracker of a run that is at `step`, or none; to be closed. Open it before `Records` sets lines aside.

    Raises UserError where its package is missing. Taught in chapter 07_pretrain.

    >>> open_trackers("none", Path("runs/a"), Recipe.from_depth(4), step=0)
    ()
    """
    check(name)
    if name == "none":
        return ()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody of itself unasked
    module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    begun = _begun(run_dir)
    told = _told(run_dir) if name in begun else {}
    run = begun.get(name) or uuid.uuid4().hex
    tracker: Tracker
    if name == "tensorboard":
        tracker = TensorBoard(module, run_dir, recipe, run, step)
    elif name == "mlflow":
        tracker = MLflow(module, run_dir, recipe, run, told)
    else:
        settings: dict[str, Any] = {"project": PROJECT, "config": recipe.model_dump(mode="json"), "resume": "allow"}
        if name == "wandb":
            settings |= {"id": run, "name": recipe.name, "dir": str(run_dir)}
        else:
            settings |= {"name": f"{recipe.name}-{run[:8]}"}  # what trackio knows a run by
        tracker = Logged(module.init(**settings), told)
    with replacing(run_dir / FILE) as path:
        path.write_text(json.dumps(begun | {name: run}), encoding="utf-8")
    return (tracker,)


def _begun(run_dir: Path) -> dict[str, str]:
    """The names by which trackers know this run."""
    path = run_dir / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _told(run_dir: Path) -> dict[str, int]:
    """By kind of record the last step that any attempt recorded."""
    last: dict[str, int] = {}
    for path in (run_dir / NAME, run_dir / ASIDE):
        for record in parsed(path.read_bytes()) if path.exists() else ():
            kind = record.get("kind", "")
            last[kind] = max(last.get(kind, -1), record.get("step", 0))
    return last
