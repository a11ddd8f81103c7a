"""A run that stands still is noticed, and says which rank it waits for.

One rank that hangs (a disk that doesn't answer, a device that fell off the bus) leaves all others waiting in their
next collective, for hours, without a word. So every rank counts the phases that it comes through, and a thread beside
it writes the count into a file that the others read. Where nobody's count has changed for too long, the ranks with the
lowest one are behind; all of them leave their stacks, and the run ends. The step itself pays an assignment a phase.
"""

import _thread
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanolearn.distributed import World
from nanolearn.errors import GO_ON, UserError
from nanolearn.train.checkpoint import FOLDER, complete

FOLDER_NAME = "heartbeats"
START = "start"  # until the first step is done: fetching, tokenising, compiling, all of it long
# Times as long: everything before the first step; 100 GB onto a slow disk; a shard of 2 GB over a slow line.
PATIENT = {START: 6.0, "checkpoint": 6.0, "data": 6.0}
SLOWEST = 5.0  # seconds between two looks; a shared file system may be later still
GRACE = 10.0  # seconds for the other ranks' stacks, and for a main thread that can still raise
PAUSED = 5.0  # seconds by which a look may be late


class Stalled(UserError):
    """A rank said nothing for too long; the run was ended, and goes on from its newest checkpoint.

    Taught in chapter 14_scaling_out.
    """


Beat = tuple[int, int, str]  # steps done, phases since then, phase


def limit(phase: str, minutes: float) -> float:
    """Seconds of silence that a phase may take. Taught in chapter 14_scaling_out.

    >>> limit("reduce", 10), limit("start", 10)
    (600.0, 3600.0)
    """
    return 60 * minutes * PATIENT.get(phase, 1.0)


def behind(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that the others wait for: those that came least far.

    >>> behind({0: (3, 9, "reduce"), 1: (3, 7, "data"), 2: (3, 9, "reduce")})
    [1]

    Taught in chapter 14_scaling_out.
    """
    least = min(beat[:2] for beat in beats.values())
    return [rank for rank, beat in sorted(beats.items()) if beat[:2] == least]


def described(ranks: Sequence[int], beats: Mapping[int, Beat], size: int, silent: float) -> str:
    """One line for a person. Taught in chapter 14_scaling_out.

    >>> described([1], {0: (3, 9, "reduce"), 1: (3, 7, "data")}, 2, 61.0)
    'no rank came on for 61 s; behind: rank 1 of 2 (step 4, data)'
    """
    named = ", ".join(f"rank {rank} of {size} (step {beats[rank][0] + 1}, {beats[rank][2]})" for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"no rank came on for {silent:.0f} s; behind: {named}{more}"


class Pulse:
    """Says where this rank is, and ends the run when no rank has come on for `minutes` (0: never).

    `beat(phase)` is called by the thread that trains. When the run stands still, each rank writes the stacks of its
    threads to heartbeats/rank_N.txt. Then the main thread gets a KeyboardInterrupt, which leaves the block as
    `Stalled`; a process whose main thread can't even do that ends with exit code 75.

    >>> import tempfile
    >>> with Pulse(Path(tempfile.mkdtemp()), World(), 10) as pulse:
    ...     pulse.stepped(3)
    ...     pulse.beat("data")
    ...     pulse.now
    (3, 1, 'data')

    Taught in chapter 14_scaling_out.
    """

    def __init__(self, run_dir: Path, world: World, minutes: float) -> None:
        self.run_dir, self.folder, self.world, self.minutes = run_dir, run_dir / FOLDER_NAME, world, minutes
        self.warm = False
        self.now: Beat = (0, 0, START)
        self._error: Stalled | None = None
        self.period = min(SLOWEST, max(60 * minutes / 8, 0.05))
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._heard: dict[int, tuple[Beat, float]] = {}  # each rank's last word, and when it came

    def beat(self, phase: str) -> None:
        """This rank begins a phase. Until the first step is done every phase counts as the start."""
        self.now = (self.now[0], self.now[1] + 1, phase if self.warm else f"{START}, {phase}")

    def stepped(self, done: int) -> None:
        """A step is done. Counting begins anew: not every rank has as much to do between two steps."""
        self.warm, self.now = True, (done, 0, "between steps")

    def __enter__(self) -> "Pulse":
        if self.minutes:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self._file(self.world.rank), self._stack(self.world.rank)):
                old.unlink(missing_ok=True)
            self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._file(self.world.rank).unlink(missing_ok=True)  # who has ended is waited for by nobody
        if self._error is not None and kind is KeyboardInterrupt:
            raise self._error from None

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def _stack(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.txt"

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self.period):
            if time.monotonic() - last > PAUSED + 4 * self.period:
                self._heard.clear()  # this process itself was held up, by a debugger or Ctrl-Z: count anew
            last = time.monotonic()
            self._publish()
            self._listen()
            beats = {rank: beat for rank, (beat, _) in self._heard.items()}
            silent = {rank: time.monotonic() - since for rank, (_, since) in self._heard.items()}
            if all(silent[rank] > limit(beats[rank][2].split(",")[0], self.minutes) for rank in beats):
                return self._end(beats, min(silent.values()))

    def _publish(self) -> None:
        try:
            path = self._file(self.world.rank)
            aside = path.with_suffix(".tmp")
            aside.write_text(json.dumps(self.now), encoding="utf-8")
            aside.replace(path)
        except OSError:
            pass  # a full disk is for the records and checkpoints to name

    def _listen(self) -> None:
        self._hear(self.world.rank, self.now)
        for rank in set(range(self.world.size)) - {self.world.rank}:
            try:
                done, count, phase = json.loads(self._file(rank).read_text(encoding="utf-8"))
            except FileNotFoundError:
                self._heard.pop(rank, None)  # not there yet, or ended: nobody waits for it
                continue
            except (OSError, ValueError):
                continue
            self._hear(rank, (done, count, phase))

    def _hear(self, rank: int, beat: Beat) -> None:
        if rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, time.monotonic())

    def _end(self, beats: Mapping[int, Beat], silent: float) -> None:
        with self._stack(self.world.rank).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        ranks = behind(beats)
        stacks = ", ".join(str(self._stack(rank)) for rank in ranks[:8])
        saved = complete(self.run_dir / FOLDER)
        newest = f"the same command goes on from {saved[0].name}" if saved else "nothing was saved yet"
        said = described(ranks, beats, self.world.size, silent)
        self._error = Stalled(f"{said}; stacks in {stacks}", newest)
        print(f"Stalled: {self._error}", file=sys.__stderr__, flush=True)
        time.sleep(min(GRACE, 4 * self.period))  # the others write theirs: a rank that ends takes them with it
        for _ in range(2):  # the first only asks for a clean stop, which may never come; the second interrupts
            if self._closed.is_set():
                return
            _interrupt()
        if not self._closed.wait(GRACE):
            os._exit(GO_ON)


def _interrupt() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes a wait, too
        time.sleep(0.2)
    else:
        _thread.interrupt_main()
