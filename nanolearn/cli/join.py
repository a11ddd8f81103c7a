"""`nanolearn join RUN_DIR`: this machine as a further node of a run that `nanolearn run` starts on the first one.

The run directory lies on a file system that all nodes share. Exit codes: 0 when the run is complete, 75 when it was
stopped and goes on, else torchrun's own.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from nanolearn.errors import UserError

POLL = 1.0  # seconds between two looks for the first node


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command. Taught in chapter 14_scaling_out."""
    command = commands.add_parser("join", help="be a further node of a run over several nodes")
    command.description = "Example: nanolearn join runs/NAME, on each node but the one that runs notebook 07"
    command.add_argument("run_dir", type=Path, help="the run's directory, on a file system that all nodes share")
    command.add_argument("--hours", type=float, default=2.0, help="how long to wait for the first node (default: 2)")
    command.set_defaults(command=_join)


def _join(options: argparse.Namespace) -> int:
    from nanolearn.execution import Execution
    from nanolearn.hardware import detect
    from nanolearn.recipe import Recipe
    from nanolearn.train.follow import attend, start
    from nanolearn.train.identity import EXECUTION, RECIPE, check_nodes
    from nanolearn.train.launch import rendezvous, torchrun
    from nanolearn.train.outcome import GO_ON, incomplete
    from nanolearn.train.records import RESULT, finished

    if not options.hours >= 0:
        raise UserError(f"--hours {options.hours:g}", "give how long to wait, such as 2")
    run_dir, until = options.run_dir.resolve(), time.monotonic() + 3600 * options.hours
    for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        signal.signal(number, _leave)
    try:
        wait_for(lambda: (run_dir / EXECUTION).exists(), f"a run in {run_dir}", until)
        recipe, execution = Recipe.load(run_dir / RECIPE), Execution.load(run_dir / EXECUTION)
        if execution.nodes == 1:
            raise UserError(f"the run in {run_dir} is one node's", "start it with nodes=2 rendezvous=HOST:29500")
        check_nodes(execution)
        if finished(run_dir, recipe.digest):
            print(f"the run in {run_dir} is complete")
            return 0
        wait_for(lambda: answers(execution.rendezvous), f"the first node at {execution.rendezvous}", until)
    except KeyboardInterrupt:
        return GO_ON
    recipe, execution = Recipe.load(run_dir / RECIPE), Execution.load(run_dir / EXECUTION)  # written anew since
    log = run_dir / f"workers.{socket.gethostname()}-{os.getpid()}.log"
    print(f"joining {recipe.name}; what this node's workers print is in {log}", flush=True)
    count = execution.local_world(detect())
    workers = start(torchrun(run_dir, count, rendezvous(recipe, execution, host=False)), count, log)
    asked = attend(workers, run_dir / RESULT)
    if finished(run_dir, recipe.digest):
        return 0
    if asked or incomplete(run_dir) or "Stalled: " in log.read_text(encoding="utf-8", errors="replace"):
        print(f"stopped: the same command goes on (exit code {GO_ON})", flush=True)
        return GO_ON
    print(log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
    return workers.returncode or 1


def _leave(*_) -> None:
    raise KeyboardInterrupt


def wait_for(ready, what: str, until: float) -> None:
    """Wait until `ready()`, saying once for `what`. Raises UserError when the time (of time.monotonic) is over.

    >>> wait_for(lambda: True, "nothing", 0.0)

    Taught in chapter 14_scaling_out.
    """
    said = False
    while not ready():
        if not said:
            print(f"waiting for {what}", flush=True)
            said = True
        if time.monotonic() > until:
            raise UserError(f"{what} did not come", "start it on the first node, or give more --hours")
        time.sleep(POLL)


def answers(address: str) -> bool:
    """Whether somebody listens at HOST:PORT.

    >>> answers("127.0.0.1:1")
    False

    Taught in chapter 14_scaling_out.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True
