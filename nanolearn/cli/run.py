"""`nanolearn run`: a chapter's notebook as a headless job, with parameters.

Exit codes: papermill's own (0: all cells ran, and the run is complete), 75 when the run was stopped (SIGTERM, SIGINT,
SIGHUP, SIGUSR1, max_hours, a stalled rank) and the same command goes on, 2 for what a person can put right at once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from nanolearn.errors import UserError

POLL = 0.5  # seconds between two looks at the job
NAMING = 120.0  # seconds that --detach waits for the job to name its run directory


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command. Taught in chapter 07_pretrain."""
    command = commands.add_parser("run", help="run a chapter's notebook headless, with parameters")
    command.description = "Example: nanolearn run 07 -p depth 6 -p overrides 'steps=200'"
    command.add_argument("chapter", help="its number, such as 07, or its name")
    for flag, name, about in (
        ("-p", "parameters", "a parameter of the notebook"),
        ("-r", "texts", "a parameter that stays text, whatever it looks like"),
    ):
        command.add_argument(
            flag, dest=name, help=about, nargs=2, action="append", default=[], metavar=("NAME", "VALUE")
        )
    command.add_argument("-f", dest="file", type=Path, help="a YAML file of parameters, as in exec/recipes")
    command.add_argument("--out", type=Path, help="the executed notebook (default: out/CHAPTER.ipynb)")
    command.add_argument("--detach", action="store_true", help="start it and leave: it outlives this terminal")
    command.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from nanolearn.paths import home

    notebook = find_notebook(options.chapter, home() / "notebooks")
    check_names(notebook, [name for name, _ in (*options.parameters, *options.texts)])
    out = (options.out or Path("out") / notebook.name).resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent} can't be made ({error.strerror})", "give another --out") from None
    if out.is_dir():
        raise UserError(f"{out} is a folder", "give the executed notebook's own name to --out")
    given = [word for pair in options.parameters for word in ("-p", *pair)]
    given += [word for pair in options.texts for word in ("-r", *pair)]
    if options.file is not None:
        if not options.file.is_file():
            raise UserError(f"no parameter file {options.file}", "give one of exec/recipes, or your own")
        check_names(notebook, names_in(options.file))
        given = ["-f", str(options.file.resolve()), *given]  # first: -p and -r win over it
    return detach(notebook, out, given) if options.detach else job(notebook, out, given)


def job(notebook: Path, out: Path, given: Sequence[str]) -> int:
    """Run the notebook through papermill and wait; a signal lets its training save and stop. The exit code.

    Taught in chapter 07_pretrain.
    """
    from nanolearn.train.agent import STARTED_BY
    from nanolearn.train.outcome import GO_ON, NOTE, error_line, error_name, exit_code, noted

    runs = note_of(out)
    for old in (runs, out):  # what an earlier job left says nothing about this one
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "nanolearn.cli.headless", "--log-output", "--no-progress-bar"]
    # A session of its own: Ctrl-C in a terminal must reach the kernel from here only, once.
    child = subprocess.Popen(
        [*command, str(notebook), str(out), *given],
        env={**os.environ, NOTE: str(runs), STARTED_BY: str(os.getpid())},
        start_new_session=True,
    )
    papermills, signalled = wait(child, runs)
    print(f"executed notebook: {out}")
    code = exit_code(papermills, error_name(out), noted(runs), signalled)
    if said := error_line(out):
        print(said, flush=True)
    if code == GO_ON:
        print(f"stopped: the same command goes on (exit code {GO_ON})", flush=True)
    return code


def note_of(out: Path) -> Path:
    """Where a job notes the directories of the runs that it starts: beside the executed notebook.

    >>> note_of(Path("out/07_pretrain.ipynb")).name
    '07_pretrain.runs'

    Taught in chapter 07_pretrain.
    """
    return out.with_suffix(".runs")


def wait(child: subprocess.Popen, runs: Path) -> tuple[int, bool]:
    """Wait for the job's end, handing each signal to stop on to its kernel: the exit code, and whether one came.

    Taught in chapter 07_pretrain.
    """
    from nanolearn.cli.headless import STOP

    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in STOP}
    sent = 0
    try:
        while True:
            try:
                return child.wait(POLL), bool(asked)
            except subprocess.TimeoutExpired:
                pass
            # Between two cells a kernel hears nothing: it is told again until a run has begun, which saves at once.
            if asked and (sent < len(asked) or not runs.exists()) and interrupt_kernel(child.pid):
                sent = len(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_kernel(pid: int) -> bool:
    """Send SIGINT to the notebook's kernel, the child of process `pid`; whether there was one.

    Taught in chapter 07_pretrain.

    >>> interrupt_kernel(os.getpid())
    False
    """
    import psutil

    try:
        kernels = [one for one in psutil.Process(pid).children() if any("ipykernel" in word for word in one.cmdline())]
        for kernel in kernels:
            kernel.send_signal(signal.SIGINT)
    except psutil.Error:  # it ended in this moment
        return False
    return bool(kernels)


def detach(notebook: Path, out: Path, given: Sequence[str]) -> int:
    """Start the job in a session of its own, say what it is and how to watch and stop it, and return.

    Taught in chapter 07_pretrain.
    """
    from nanolearn.train.outcome import noted

    log, runs = out.with_suffix(".log"), note_of(out)
    runs.unlink(missing_ok=True)
    again = ["run", notebook.stem, *given, "--out", str(out)]
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "nanolearn.cli", *again],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    until = time.monotonic() + NAMING
    while child.poll() is None and not noted(runs) and time.monotonic() < until:
        time.sleep(POLL)
    if child.poll():
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"the job ended at once, with exit code {child.returncode} ({last})", f"read {log}")
    folders = noted(runs)
    print(f"process {child.pid}, log {log}")
    print(f"run directory: {folders[0]}" if folders else f"run directory: not known yet, see {log}")
    print(f"read along:  tail -f {log}")
    if folders:
        print(f"live curve:  open {notebook} with run_dir = {str(folders[0])!r}: it only watches")
    print(f"save, stop:  kill {child.pid}   (the same command goes on)")
    return 0


def find_notebook(chapter: str, folder: Path) -> Path:
    """The notebook of a chapter, by number ("07" or "7") or name. Raises UserError, listing what there is.

    >>> find_notebook("99", Path("nowhere"))
    Traceback (most recent call last):
    nanolearn.errors.UserError: no chapter '99' in nowhere: run this in the project's checkout
    """
    there = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    wanted = chapter.removesuffix(".ipynb")
    for path in there:
        number = path.stem.split("_")[0]
        if wanted in (path.stem, number) or (wanted.isdigit() and int(wanted) == int(number)):
            return path
    names = ", ".join(path.stem for path in there)
    raise UserError(
        f"no chapter {chapter!r} in {folder}", f"give one of {names}" if names else "run this in the project's checkout"
    )


def names_in(file: Path) -> list[str]:
    """The parameters that a YAML file gives. Raises UserError for a file that gives none, or is no YAML.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "mine.yaml"
    >>> _ = path.write_text("depth: 6")
    >>> names_in(path)
    ['depth']
    """
    import yaml

    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is no YAML ({str(error).splitlines()[0]})", "write lines such as depth: 6") from None
    if not isinstance(given, dict):
        raise UserError(f"{file} gives no parameters", "write lines such as depth: 6")
    return [str(name) for name in given]


def check_names(notebook: Path, names: Sequence[str]) -> None:
    """Refuse a parameter that the notebook does not declare, before papermill starts (it only warns).

    Raises UserError with the nearest name.
    """
    from nanolearn.lab import params

    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    declared = params.declaration(["".join(cell["source"]) for cell in tagged])
    for name in names:
        if name not in declared:
            raise params.unknown(name, declared)
