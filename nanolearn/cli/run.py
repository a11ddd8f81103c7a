"""`nanolearn run`: a chapter's notebook as a headless job, with parameters."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nanolearn.errors import UserError


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
    command.add_argument("--out", type=Path, help="the executed notebook (default: out/CHAPTER.ipynb)")
    command.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from nanolearn.paths import home

    notebook = find_notebook(options.chapter, home() / "notebooks")
    check_names(notebook, [name for name, _ in (*options.parameters, *options.texts)])
    out = options.out or Path("out") / notebook.name
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", "--log-output", "--no-progress-bar", str(notebook), str(out)]
    command += [word for pair in options.parameters for word in ("-p", *pair)]
    command += [word for pair in options.texts for word in ("-r", *pair)]
    code = subprocess.run(command).returncode
    print(f"executed notebook: {out.resolve()}")
    return code


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
