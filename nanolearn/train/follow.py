"""A run of other processes, seen from this one: started, followed through its records, stopped, and heard.

What the workers print goes to workers.log, where the first traceback is looked for if one of them fails.
"""

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import psutil

from nanolearn.errors import Unreachable, UserError
from nanolearn.train.agent import STARTED_BY
from nanolearn.train.records import NAME, RESULT, Observer, Result, parsed
from nanolearn.train.stall import Stalled
from nanolearn.train.watch import Interrupts

LOG = "workers.log"  # of the first node; the others' are workers.NAME.log
TRACEBACK = "Traceback (most recent call last)"
POLL = 0.25  # seconds between two looks at the workers' records
LEAVING = 20.0  # seconds for torchrun to end by itself once the result is written and its workers are gone
GRACE = 1800  # seconds for a save after SIGTERM: 100 GB, written and read back at 100 MB/s; torchrun's own are 30


class Follower:
    """Hands each record that other processes write to the observers: once, whole, in order.

    What lies there at the start is known already. A run that is resumed puts a shorter file in the place of the old
    one: it is read from its beginning, and the lines that it kept are not handed on again.

    >>> import tempfile
    >>> folder, seen = Path(tempfile.mkdtemp()), []
    >>> follower = Follower(folder, [seen.append])
    >>> _ = (folder / NAME).write_text('{"step": 1}\\n{"st')
    >>> follower.look()
    >>> seen
    [{'step': 1}]

    Taught in chapter 07_pretrain.
    """

    def __init__(self, run_dir: Path, observers: Sequence[Observer]) -> None:
        self.path, self.observers = Path(run_dir) / NAME, observers
        self.file, self.offset = 0, 0  # the file's number, and how far it was read
        self.known: list[bytes] = []  # a run of 20,000 steps: 10 MB
        self._new_lines()

    def look(self) -> None:
        """Hand on what was written since the last look, up to the last whole line."""
        for record in parsed(b"\n".join(self._new_lines())):
            for observer in self.observers:
                observer(record)

    def _new_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if replaced := status.st_ino != self.file or status.st_size < self.offset:
                self.file, self.offset = status.st_ino, 0
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        lines = whole.splitlines()
        if replaced:
            # What it kept comes first, in the old order; `in` moves the iterator on to the line that was found.
            before = iter(self.known)
            self.known = list(takewhile(lambda line: line in before, lines))
            lines = lines[len(self.known) :]
        self.known += lines
        return lines


def start(command: Sequence[str], count: int, log: Path) -> subprocess.Popen:
    """Start the workers' agent in a session of its own: Ctrl-C in a terminal must reach it from here only, once.

    What they print goes to `log`. Taught in chapter 14_scaling_out.
    """
    usual = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),  # unset, torchrun gives each process one
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE),
    }
    environment = {**usual, **os.environ, STARTED_BY: str(os.getpid())}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def attend(workers: subprocess.Popen, result: Path, look: Callable[[], None] = lambda: None) -> str:
    """Wait for the workers, looking at their records; a signal lets them save and stop. Its name, or "".

    torchrun waits five minutes for the nodes that left before it: it is ended once the result is there and this node's
    workers have been gone for a while. Taught in chapter 14_scaling_out.
    """
    interrupts, told, ended = Interrupts(), False, math.inf
    try:
        with interrupts:
            while workers.poll() is None:
                time.sleep(POLL)
                look()
                if not result.exists() or _children(workers):
                    ended = math.inf
                elif time.monotonic() - (ended := min(ended, time.monotonic())) > LEAVING:
                    workers.kill()  # deaf while it waits for the others; all is written
                if interrupts.asked and not told:
                    workers.terminate()  # torchrun hands it on
                    told = True
    except KeyboardInterrupt:
        interrupts.asked = interrupts.asked or "SIGINT"
    finally:
        if workers.poll() is None:
            workers.terminate()
            workers.wait()
    look()
    return interrupts.asked


def _children(agent: subprocess.Popen) -> bool:
    try:
        return bool(psutil.Process(agent.pid).children())
    except psutil.Error:  # it ended in this moment
        return False


def follow(command: Sequence[str], count: int, run_dir: Path, observers: Sequence[Observer]) -> Result:
    """Start the workers, hand on their records, return their result; an interrupt lets them save and stop.

    Raises UserError with the line of a worker that raised one, KeyboardInterrupt where the workers were stopped before
    they had anything to save, RuntimeError with the traceback of any other failure. Taught in chapter 14_scaling_out.
    """
    for old in (run_dir / RESULT, *run_dir.glob("workers*.log")):
        old.unlink(missing_ok=True)  # of a part of the run that was stopped
    follower = Follower(run_dir, observers)
    asked = attend(start(command, count, run_dir / LOG), run_dir / RESULT, follower.look)
    if (run_dir / RESULT).exists():
        return Result.model_validate_json((run_dir / RESULT).read_text(encoding="utf-8"))
    error = failure(run_dir)
    raise KeyboardInterrupt(asked) if asked and not isinstance(error, UserError) else error


def failure(run_dir: Path) -> Exception:
    """What the first worker that failed said: its own line, or its own traceback; from the logs of all nodes.

    Taught in chapter 14_scaling_out.
    """
    logs = sorted(run_dir.glob("workers*.log"))
    texts = {log: log.read_text(encoding="utf-8", errors="replace") for log in logs}
    for kind in (Stalled, Unreachable, UserError):
        for text in texts.values():
            if said := re.search(rf"{kind.__name__}: (.+)", text):
                return kind(said[1])
    told = {log: text[at:][:4000] for log, text in texts.items() if (at := text.find(TRACEBACK)) >= 0}
    # A worker whose peer is gone only says that: the one that failed by itself comes first.
    for log in sorted(told, key=lambda log: "Connection" in told[log]):
        return RuntimeError(f"a worker failed, see {log}:\n{told[log]}")
    return RuntimeError(f"the workers ended without a result, see {run_dir / LOG}:\n{''.join(texts.values())[-2000:]}")
