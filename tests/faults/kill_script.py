"""Start a run again and again on given numbers of ranks, and kill all of it by SIGKILL; let the last start finish.

Importing torch takes longer than the run, so it is imported once, and each rank is a fork of this process, made
before any thread was. `python kill_script.py RUN_DIR SEED RANKS...`: one start for each number of ranks. Prints a line
of JSON for each: ranks, the step that was on record, and whether a save was being written, when it was killed.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

from nanolearn import distributed
from nanolearn.data.sources import open_source
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.trainer import train


def rank(run: Path, number: int, ranks: int, port: int) -> None:
    """One rank, in a process of its own; says nothing."""
    os.setsid()
    silence = os.open(run.with_suffix(".log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= where | {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    recipe, execution = Recipe.load(run / "recipe.json"), Execution.load(run.with_suffix(".execution"))
    tokenizer = Tokenizer.load(run.with_suffix(".tokenizer"))
    train(recipe, execution, run, machine=cpu(), source=open_source(recipe.data), tokenizer=tokenizer)
    distributed.stop()


def start(run: Path, ranks: int) -> list[int]:
    """Process ids of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for number in range(ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                rank(run, number, ranks, port)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return children


def wait_for(run: Path, chance: random.Random) -> None:
    """A random instant: half of them inside a save, as soon as one is seen, the others after some steps or none."""
    steps, saving = chance.randrange(12), chance.random() < 0.5
    first, deadline = on_record(run), time.monotonic() + 60
    while time.monotonic() < deadline and on_record(run) < first + steps:
        time.sleep(0.002)
    while saving and time.monotonic() < deadline and not writing(run):
        time.sleep(0.0005)
    time.sleep(chance.random() * (0.02 if saving else 0.3))


def on_record(run: Path) -> int:
    path = run / "records.jsonl"
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


def writing(run: Path) -> bool:
    return any((run / "checkpoints").glob(".writing-*"))


def main(run: Path, seed: int, counts: list[int]) -> None:
    chance = random.Random(seed)
    for number, ranks in enumerate(counts):
        children = start(run, ranks)
        last = number == len(counts) - 1
        if not last:
            wait_for(run, chance)
            assert not (run / "result.json").exists(), "the run was over before it was killed often enough"
            print(json.dumps({"ranks": ranks, "steps": on_record(run), "writing": writing(run)}), flush=True)
            chance.shuffle(children)
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if last and any(codes):
            raise SystemExit(f"the last start failed: {codes}\n{run.with_suffix('.log').read_text()[-3000:]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(ranks) for ranks in sys.argv[3:]])
