"""The records of a run in a viewer that people know: TensorBoard, MLflow, trackio or Weights & Biases.

Each is a few lines behind the same record that goes into `records.jsonl`, so none of them knows more than that file,
and the file needs none of them. A tracked run belongs to its run directory: a resume goes on in it, and does not tell
again what was told before (promise 2: it would be the same numbers). Only TensorBoard is told again, since it keeps
points in memory for a while, which a kill loses; it forgets its points after a resume by itself.

A tracker never holds up a run, and never ends one: it works in a thread of its own, a record or two behind, and one
that fails (no network, a locked store) is given up, said aloud. A kill can cost it those last records.
"""

import importlib.util
import json
import os
import queue
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanolearn.errors import UserError
from nanolearn.fetch import replacing
from nanolearn.recipe import Recipe
from nanolearn.train.records import ASIDE, NAME, parsed

FILE, PROJECT = "tracker.json", "nanolearn"
CLOSING = 120.0  # seconds for what is left to tell, before a run ends without it
SCALARS = ("loss", "grad_norm", "loss_z", "norm_z", "rate", "tokens", "tokens_per_second", "mfu", "stall", "memory")
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


class Beside:
    """A tracker that works in a thread of its own: an observer that returns at once and never raises.

    Taught in chapter 07_pretrain.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker, self.failed = name, tracker, False
        self.waiting: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self.thread.start()

    def __call__(self, record: dict) -> None:
        if not self.failed:
            self.waiting.put(record)

    def _work(self) -> None:
        try:
            while (record := self.waiting.get()) is not None:
                self.tracker(record)
            self.tracker.close()
        except Exception as error:
            self.failed = True
            self._say(f"failed ({type(error).__name__}: {error})")

    def _say(self, what: str) -> None:
        print(f"tracker={self.name} {what}: the run goes on without it, {NAME} has all", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Tell what is left to tell, for at most two minutes."""
        self.waiting.put(None)
        self.thread.join(CLOSING)
        if self.thread.is_alive():
            self._say(f"took longer than {CLOSING:.0f} s to end")


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
    """trackio, and Weights & Biases, whose interface it copies. W&B heeds WANDB_MODE=offline by itself.

    The tests have a stand-in; trackio 0.43.0 and wandb 0.31.0 (offline) were tried by hand, with a stop and a resume.
    """

    def __init__(self, run: Any, told: Mapping[str, int]) -> None:
        super().__init__(told)
        self.run = run

    def numbers(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def text(self, prompt: str, text: str, step: int) -> None:
        self.run.log({f"sample/{prompt or 'no prompt'}": prompt + text}, step=step)

    def close(self) -> None:
        self.run.finish()


def open_trackers(name: str, run_dir: Path, recipe: Recipe, step: int) -> tuple[Beside, ...]:
    """The tracker of a run that is at `step`, or none; to be closed. Open it before `Records` sets lines aside.

    Raises UserError where its package is missing, or it can't be opened. Taught in chapter 07_pretrain.

    >>> open_trackers("none", Path("runs/a"), Recipe.from_depth(4), step=0)
    ()
    """
    check(name)
    if name == "none":
        return ()
    begun = _begun(run_dir)
    run = begun.get(name) or uuid.uuid4().hex
    try:
        tracker = _opened(name, run_dir, recipe, run, step, _told(run_dir) if name in begun else {})
    except Exception as error:  # each package has its own for "not logged in" or "no such store"
        remedy = "`wandb login`, or WANDB_MODE=offline" if name == "wandb" else "mend that, or leave tracker out"
        raise UserError(f"tracker={name} can't be opened ({error})", remedy) from error
    with replacing(run_dir / FILE) as path:
        path.write_text(json.dumps(begun | {name: run}), encoding="utf-8")
    return (Beside(name, tracker),)


def _opened(name: str, run_dir: Path, recipe: Recipe, run: str, step: int, told: Mapping[str, int]) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody of itself unasked
    module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    if name == "tensorboard":
        return TensorBoard(module, run_dir, recipe, run, step)
    if name == "mlflow":
        return MLflow(module, run_dir, recipe, run, told)
    settings: dict[str, Any] = {"project": PROJECT, "config": recipe.model_dump(mode="json"), "resume": "allow"}
    if name == "wandb":
        settings |= {"id": run, "name": recipe.name, "dir": str(run_dir)}
    else:
        settings |= {"name": f"{recipe.name}-{run[:8]}"}  # what trackio knows a run by
    return Logged(module.init(**settings), told)


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
