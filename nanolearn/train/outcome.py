"""How a headless job ended, for whoever started it: which runs it began, and whether it wants to go on.

A notebook can't choose an exit code. So each run that is launched leaves its directory in a file that the starter
named, and from the results that lie there follows the code: 0 complete, 75 stopped and resumable (EX_TEMPFAIL, "try
again later", of sysexits.h; Slurm scripts and systemd start again on it), 2 where the notebook ended with what a person
can put right, else what papermill said.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from nanolearn.errors import GO_ON, UserError
from nanolearn.train.records import RESULT

NOTE = "NANOLEARN_NOTE"  # a file's path, in the environment of the job
MISTAKE = 2  # what a person can put right
GOES_ON = ("Stalled", "Unreachable")  # a hung device, a network that was gone for long: try again later
STOPS = ("", "KeyboardInterrupt")  # how a notebook ends that was told to stop: "" where its kernel is gone


def note(run_dir: Path) -> None:
    """Leave the run's directory for the starter of this job, if there is one. Taught in chapter 07_pretrain.

    >>> note(Path("runs/a"))  # nobody asked
    """
    if path := os.environ.get(NOTE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{run_dir}\n")


def noted(path: Path) -> list[Path]:
    """The run directories in a note, each once, in order. Taught in chapter 07_pretrain.

    >>> noted(Path("nowhere"))
    []
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Path(line) for line in dict.fromkeys(text.splitlines())]


def incomplete(run_dir: Path) -> bool:
    """Whether a run's result says that it was stopped before its end. Taught in chapter 07_pretrain."""
    try:
        return not json.loads((run_dir / RESULT).read_text(encoding="utf-8"))["complete"]
    except (OSError, ValueError, KeyError):
        return False


def error_name(notebook: Path) -> str:
    """The name of the exception that an executed notebook ended with, "" if none is there.

    >>> error_name(Path("nowhere"))
    ''

    Taught in chapter 07_pretrain.
    """
    return _error(notebook).get("ename", "")


def _error(notebook: Path) -> dict:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return {}
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output.get("output_type") == "error"]
    return errors[-1] if errors else {}


def error_line(notebook: Path) -> str:
    """What a notebook's own UserError said, "" where it ended otherwise. Taught in chapter 07_pretrain.

    >>> error_line(Path("nowhere"))
    ''
    """
    error = _error(notebook)
    # One line instead of a stack is how IPython shows a UserError of any kind.
    return error["evalue"] if error.get("traceback", [""])[0].startswith("UserError: ") else ""


def exit_code(code: int, error: str, runs: Sequence[Path], signalled: bool) -> int:
    """The job's exit code from papermill's, the notebook's exception, the runs it began, and whether it got a signal.

    >>> exit_code(0, "", [], False), exit_code(1, "Stalled", [], False), exit_code(1, "ValueError", [], True)
    (0, 75, 1)
    >>> exit_code(1, "UserError", [], False)
    2

    Taught in chapter 07_pretrain.
    """
    if code == 0:
        return GO_ON if any(incomplete(run) for run in runs) else 0
    if error in GOES_ON or (signalled and error in STOPS):
        return GO_ON
    return MISTAKE if error == UserError.__name__ else code
