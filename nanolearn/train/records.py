"""What happened in a run, as lines of JSON: the one source of every plot, report and tracker.

`records.jsonl` is only appended to, one whole line at a time, and flushed, so that a notebook can follow a
run in another process by reading up to the last line break. A run that resumes from step n continues the
file: the lines of steps beyond n belong to a history that is gone, and are moved to `records.setaside.jsonl`;
nothing is lost. Numbers that are not finite are written as null: JSON knows no NaN.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from nanolearn.errors import UserError

NAME = "records.jsonl"
ASIDE = "records.setaside.jsonl"
RESULT = "result.json"
LOCK, LAUNCHING = ".lock", ".launching"  # held by who trains; by who prepares and follows a training

REMEDY = "make room and give the same command again: the run resumes from its newest checkpoint"

Observer = Callable[[dict], None]


def _plain(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def parsed(lines: bytes) -> Iterator[dict]:
    """The records in lines of JSON; what is none is passed over. Taught in chapter 07_pretrain.

    >>> list(parsed(b'{"step": 1}\\n{"st\\n{"step": 3}'))
    [{'step': 1}, {'step': 3}]
    """
    for line in lines.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a full disk or a kill: the lines around it are still good
        if isinstance(record, dict):
            yield record


def read(run_dir: Path, kind: str | None = None) -> list[dict]:
    """All records of a run, or those of one kind ("step", "validation", "sample", ...); a half last line is left out.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / NAME).write_text('{"kind": "step", "step": 1}\\n{"kind": "st')
    >>> read(folder)
    [{'kind': 'step', 'step': 1}]

    Taught in chapter 07_pretrain.
    """
    path = Path(run_dir) / NAME
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    return [record for record in parsed(whole) if kind is None or record.get("kind") == kind]


def _set_aside(run_dir: Path, step: int) -> int:
    path = run_dir / NAME
    kept: list[bytes] = []
    gone: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        record = next(parsed(line), None) if line.endswith(b"\n") else None
        good = record is not None and record.get("step", 0) <= step
        (kept if good else gone).append(line.rstrip(b"\n") + b"\n")
    if not gone:
        return 0
    # Aside first, then the cut: a kill in between leaves a line in both files, never in none.
    with (run_dir / ASIDE).open("ab") as aside:
        aside.writelines(gone)
        aside.flush()
        os.fsync(aside.fileno())
    shorter = path.with_suffix(".tmp")
    with shorter.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(shorter, path)
    return len(gone)


class Result(BaseModel):
    """What a run came to: `result.json`, and what `train` returns.

    `stopped` is "complete", "time limit" or a signal's name; seconds says where the time went, over all
    resumes; first_step_seconds is counted from when this process was started. Taught in chapter 07_pretrain.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    recipe: str
    complete: bool
    stopped: str
    steps: int
    tokens: int
    parameters: int
    loss: float | None
    bpb: float | None
    validation_bytes: int | None
    whole_split: bool | None
    seconds: dict[str, float]
    first_step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    peak_memory: int
    skipped: int
    device: str
    dtype: str
    samples: list[dict[str, str]]


def finished(run_dir: Path, recipe_digest: str) -> Result | None:
    """The result of a run that is complete, None for one that isn't (or was never begun)."""
    try:
        result = Result.model_validate_json((Path(run_dir) / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return result if result.complete and result.recipe == recipe_digest else None


@contextmanager
def only_writer(run_dir: Path, name: str = LOCK) -> Iterator[None]:
    """Make the run directory and hold its lock; raises UserError at once if another process holds it."""
    lock = FileLock(run_dir / name)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is training in {run_dir}", "wait for it, or give another run_dir") from None
    except OSError as error:
        raise UserError(f"{run_dir} can't be written ({error.strerror})", "give another run_dir") from None
    try:
        yield
    finally:
        lock.release()


class Records:
    """The open records of a run that is at `step`; later lines of an earlier attempt are set aside.

    `append` writes one line and hands the record to the observers (progress, live curves, trackers).

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Records(folder, step=0) as records:
    ...     records.append({"kind": "step", "step": 1, "loss": float("nan")})
    >>> read(folder)
    [{'kind': 'step', 'step': 1, 'loss': None}]

    Taught in chapter 07_pretrain.
    """

    def __init__(self, run_dir: Path, step: int, observers: tuple[Observer, ...] = ()) -> None:
        self.run_dir = Path(run_dir)
        self.observers = observers
        self.set_aside = _set_aside(self.run_dir, step) if (self.run_dir / NAME).exists() else 0
        self._file = (self.run_dir / NAME).open("ab", buffering=0)

    def append(self, record: dict) -> None:
        record = _plain(record)
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        # One unbuffered write: a reader, or a kill, sees the whole line or a half last one, never lines
        # mixed.
        try:
            written = self._file.write(line)
        except OSError as error:
            raise UserError(f"{self.run_dir / NAME} can't be written ({error.strerror})", REMEDY) from error
        if written != len(line):
            raise UserError(f"{self.run_dir / NAME} can't be written (the disk is full)", REMEDY)
        for observer in self.observers:
            observer(record)

    def sync(self) -> None:
        """Force the lines onto the disk: after a power cut a checkpoint must not be newer than its history."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"{self.run_dir / NAME} can't be written ({error.strerror})", REMEDY) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self.close()
