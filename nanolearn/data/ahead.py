"""Processes that tokenise the shards which training comes to next, so that it never waits for text.

They run beside training without its interpreter's lock, at a lower priority, as many as spare cores allow, and one
team serves all ranks of a machine. Nothing depends on them: a shard that they did not make in time is made by whoever
needs it. Each holds the end of a pipe; when the process that wanted the shard is gone, the pipe says so, and it ends.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from nanolearn.data.shard import tokenise
from nanolearn.errors import UserError
from nanolearn.fetch import Held, locked
from nanolearn.tokenizer import Tokenizer

AHEAD = 2  # shards that are made before training comes to them
ELSEWHERE = 5.0  # seconds until a shard that another process holds is looked at again
AGAIN = 60.0  # seconds until a shard whose text could not be had is tried again
CORES_EACH = 4  # a process: below, two of them gain nothing over one
GENTLE = 10  # added to the processes' nice value: cores go to training first


class Job(NamedTuple):
    """What one process is to do: tokenise `text` into `path` by the tokenizer in a folder."""

    text: str
    path: str
    tokenizer: str
    digest: str
    labels: dict[str, str]
    threads: int


def share(cores: int, ranks: int) -> tuple[int, int]:
    """How many processes a machine can spare beside its ranks, and how many threads each of them gets.

    >>> share(2, 1), share(16, 1), share(96, 8)
    ((1, 1), (2, 7), (2, 44))

    Taught in chapter 02_packing.
    """
    spare = max(1, cores - ranks)
    processes = min(AHEAD, max(1, spare // CORES_EACH))
    return processes, max(1, spare // processes)


class Team:
    """The background processes of one machine; `want` is called again and again with the shards that come next.

    `path(index)` is where a shard's tokens go; `job(index)` fetches its text and says what to do (in a thread of
    this process: it waits for the network, and what it raises is met again by whoever needs the shard). `say` hears
    of each failure once. Taught in chapter 02_packing.
    """

    def __init__(
        self, processes: int, path: Callable[[int], Path], job: Callable[[int], Job], say: Callable[[str], None]
    ) -> None:
        self.size, self._path, self._job, self._say = processes, path, job, say
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._running: set[subprocess.Popen] = set()
        self._not_before: dict[int, float] = {}
        self._said: set[int] = set()
        self._closed = False

    def want(self, indices: Sequence[int]) -> None:
        """Begin with the first of these shards that are neither there nor being made; returns at once."""
        with self._lock:
            for index in indices:
                if self._closed or len(self._threads) >= self.size:
                    return
                later = time.monotonic() < self._not_before.get(index, 0.0)
                if later or index in self._threads or self._path(index).exists():
                    continue
                thread = threading.Thread(target=self._make, args=(index,), name=f"ahead-{index}", daemon=True)
                self._threads[index] = thread
                thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until what has been begun is done."""
        for thread in list(self._threads.values()):
            thread.join(seconds)

    def close(self) -> None:
        """End all processes; a shard that is half made is no shard."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def _make(self, index: int) -> None:
        pause, path = 0.0, self._path(index)
        try:
            with locked(path, wait=False):
                if not path.exists():
                    self._run(self._job(index))
        except Held:
            pause = ELSEWHERE
        except Exception as error:  # whoever needs the shard meets it again, and raises it
            if index not in self._said and not self._closed:
                self._said.add(index)
                self._say(f"{path.stem} is not made ahead of training ({error})")
            # A process that died once would die again; whoever needs the shard makes it.
            pause = float("inf") if isinstance(error, Ended) else AGAIN
        finally:
            with self._lock:
                if pause:
                    self._not_before[index] = time.monotonic() + pause
                del self._threads[index]

    def _run(self, job: Job) -> None:
        command = [sys.executable, "-m", "nanolearn.data.ahead", json.dumps(job)]
        # A session of its own: an interrupt from the keyboard is for the process that trains, which then ends this one.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        with process:
            with self._lock:
                self._running.add(process)
                if self._closed:
                    process.kill()
            said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
            code = process.wait()
            with self._lock:
                self._running.discard(process)
        if code:
            raise Ended(f"its process ended with {code}", said.splitlines()[-1] if said else "it said nothing")


class Ended(UserError):
    """A background process came to no good end."""


def main(arguments: Sequence[str]) -> None:
    """What a background process does: one job, as long as its starter lives."""
    job = Job(*json.loads(arguments[0]))
    threading.Thread(target=_end_with_starter, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(GENTLE)
    tokenizer = Tokenizer.load(job.tokenizer, job.digest)
    tokenise(Path(job.text), Path(job.path), tokenizer, job.labels, job.threads)


def _end_with_starter() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the other end is closed
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
