"""A run of other processes, seen from this one: started, followed through its records, stopped, and heard.

What the workers print goes to workers.log, where the first traceback is looked for if one of them fails.
"""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from nanolearn.errors import UserError
from nanolearn.train.agent import STARTED_BY
from nanolearn.train.records import NAME, RESULT, Observer, Result, parsed

LOG = "workers.log"
POLL = 0.25  # seconds between two looks at the workers' records
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


def start(command: Sequence[str], count: int, run_dir: Path) -> subprocess.Popen:
    """Start the workers' agent in a session of its own: Ctrl-C in a terminal must reach it from here only, once.

    Taught in chapter 14_scaling_out.
    """
    usual = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),  # unset, torchrun gives each process one
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE),
    }
    environment = {**usual, **os.environ, STARTED_BY: str(os.getpid())}
    with (run_dir / LOG).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def follow(command: Sequence[str], count: int, run_dir: Path, observers: Sequence[Observer]) -> Result:
    """Start the workers, hand on their records, return their result; an interrupt lets them save and stop.

    Raises UserError with the line of a worker that raised one, RuntimeError with the traceback of any other
    failure. Taught in chapter 14_scaling_out.
    """
    (run_dir / RESULT).unlink(missing_ok=True)  # of a part of the run that was stopped
    follower = Follower(run_dir, observers)
    workers = start(command, count, run_dir)
    try:
        while workers.poll() is None:
            time.sleep(POLL)
            follower.look()
    except KeyboardInterrupt:
        workers.terminate()  # torchrun hands it on; the workers save and stop
        workers.wait()
    finally:
        if workers.poll() is None:
            workers.terminate()
            workers.wait()
    follower.look()
    if (run_dir / RESULT).exists():
        return Result.model_validate_json((run_dir / RESULT).read_text(encoding="utf-8"))
    raise failure(run_dir / LOG)


def failure(log: Path) -> Exception:
    """What the first worker that failed said: its own line, or its own traceback. Taught in chapter 14_scaling_out."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if said := re.search(r"UserError: (.+)", text):
        return UserError(said[1])
    start = text.find("Traceback (most recent call last)")
    return RuntimeError(f"a worker failed, see {log}:\n{text[start:][:4000] if start >= 0 else text[-2000:]}")
