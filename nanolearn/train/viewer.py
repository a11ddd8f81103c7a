"""A run of somebody else's, watched: its records are followed until it ends, and nothing is done to it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from nanolearn.errors import UserError
from nanolearn.recipe import Recipe
from nanolearn.train import records
from nanolearn.train.follow import POLL, Follower
from nanolearn.train.identity import RECIPE
from nanolearn.train.records import LAUNCHING, LOCK, RESULT, Observer, Result


def held(run_dir: Path) -> bool:
    """Whether another process trains in this folder now, or is about to. Taught in chapter 07_pretrain.

    >>> held(Path("nowhere"))
    False
    """
    return any(_locked(Path(run_dir) / name) for name in (LOCK, LAUNCHING))


def _locked(path: Path) -> bool:
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # what is wrong with it is said by who wants to write
    lock.release()
    return False


def watch(run_dir: Path, observers: Sequence[Observer], say: Callable[[str], None] = print) -> Result:
    """Follow a live run until it ends or this process is interrupted; the run never notices. Its result so far.

    Raises UserError where it has not come to its first step: there is nothing to show. Taught in chapter 07_pretrain.
    """
    say(f"another process trains in {run_dir}: this one only watches, and may be interrupted")
    follower, why = Follower(run_dir, observers), "its process ended without a result"
    try:
        while held(run_dir):
            time.sleep(POLL)
            follower.look()
    except KeyboardInterrupt:
        why = "still running"
        say("no longer watching; the run goes on")
    follower.look()
    if why != "still running" and (run_dir / RESULT).exists():
        return Result.model_validate_json((run_dir / RESULT).read_text(encoding="utf-8"))
    if not records.read(run_dir, "step"):
        raise UserError(f"the run in {run_dir} has not come to its first step ({why})", "look at it again later")
    return so_far(run_dir, why)


def so_far(run_dir: Path, stopped: str) -> Result:
    """What a run that has no result came to, from its records. Taught in chapter 07_pretrain."""
    recipe = Recipe.load(run_dir / RECIPE)
    history = records.read(run_dir)
    last = {kind: {} for kind in ("start", "step", "validation")} | {record["kind"]: record for record in history}
    start, step, validation = last["start"], last["step"], last["validation"]
    steps = [record for record in history if record["kind"] == "step"]
    spent = sum(record["seconds"] for record in steps)
    waited = sum(record["stall"] for record in steps)
    samples = [record for record in history if record["kind"] == "sample"]
    newest = [one for one in samples if one["step"] == samples[-1]["step"]]
    return Result(
        name=recipe.name,
        recipe=recipe.digest,
        complete=False,
        stopped=stopped,
        steps=step.get("step", 0),
        tokens=step.get("tokens", 0),
        parameters=start.get("parameters", 0),
        loss=step.get("loss"),
        bpb=validation.get("bpb"),
        validation_bytes=validation.get("bytes"),
        whole_split=validation.get("whole"),
        seconds={"steps": spent - waited, "waiting for data": waited},
        first_step_seconds=None,
        tokens_per_second=len(steps) * recipe.batch_tokens / spent if spent else None,
        mfu=step.get("mfu"),
        peak_memory=step.get("memory", 0),
        skipped=sum(record["skipped"] for record in steps),
        device=start.get("device", ""),
        dtype=start.get("dtype", ""),
        samples=[{"prompt": one["prompt"], "text": one["text"]} for one in newest],
    )
