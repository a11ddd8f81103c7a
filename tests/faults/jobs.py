"""Notebook 07 as a real headless job over a tiny model, for the tests that stop it, kill it or break it."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from nanolearn.train import records

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "batch_tokens=256 sequence_len=32 vocab_size=300 n_embd=32 head_dim=16 n_layer=1 val_tokens=0"
SHAPE += " micro_batch=4 num_threads=1 sample_every=1000000"
LONG = f"{SHAPE} steps=1000000 max_passes=100000000 max_hours=100"
SYLLABLES = [a + b for a in ("st", "l", "p", "w", "th", "r", "c") for b in ("ate", "aw", "ear", "ing", "o", "y")]


def corpus(folder: Path) -> Path:
    """Sixty short texts."""
    draw = random.Random(0)
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(" ".join(draw.choices(SYLLABLES, k=draw.randrange(40, 200))) + ".")
    return folder


class Job:
    """`nanolearn run 07` in a process of its own, with its output in a file."""

    def __init__(
        self, folder: Path, overrides: str, *flags: str, run_dir: Path | None = None, **environment: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.run_dir, self.out = folder, run_dir or folder / "run", folder / "out.ipynb"
        texts = folder / "texts"
        given = {"depth": "1", "data": str(texts if texts.exists() else corpus(texts)), "run_dir": str(self.run_dir)}
        words = [word for name, value in given.items() for word in ("-p", name, value)]
        command = ["run", "07", *words, "-r", "overrides", overrides, "--out", str(self.out), *flags]
        self.log = folder / "job.txt"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanolearn.cli", *command],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
            )

    def until_step(self, number: int) -> None:
        """Wait until the run has taken so many steps."""
        wait(lambda: any(r["step"] >= number for r in records.read(self.run_dir, "step")), 120, self.text)

    def end(self, seconds: float = 60) -> int:
        """Wait for the job's end; its exit code."""
        return self.process.wait(seconds)

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every process of the job, itself included."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def kernel(self) -> psutil.Process:
        """The notebook's kernel."""
        return next(p for p in self.processes() if "ipykernel_launcher" in " ".join(p.cmdline()))


def wait(ready: Callable[[], bool], seconds: float, said: Callable[[], str] = str) -> None:
    """Wait until `ready()`; fail with what was said."""
    give_up = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < give_up, said()
        time.sleep(0.05)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
