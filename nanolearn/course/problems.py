"""A graded problem: a statement, a typed stub to fill in, checks of an answer, and answers whose verdict is known.

Each lies in a folder of its own, `notebooks/assignments/CHAPTER/PROBLEM/`: problem.json, README.md (the statement),
stub.py, checks.py, and staff/ with reference.py and wrong.toml: at least three answers that people give, each told
as changes of the reference. An answer is a Python file with the stub's names. Checks are functions
`check_...(answer)` that raise AssertionError with a message that points at the idea; they see an answer only as a
module. What a check is worth is known by what it rejects: the tests hold every problem to a stub that fails all
checks, a reference that passes them, and wrong answers that each fail at least one.
"""

import importlib.util
import inspect
import json
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel, ConfigDict, Field

from nanolearn.errors import UserError
from nanolearn.lab.plots import show_text
from nanolearn.overrides import nearest, validated
from nanolearn.paths import home

ABOUT, STATEMENT, STUB, CHECKS = "problem.json", "README.md", "stub.py", "checks.py"
STAFF, WRONG = "staff", "wrong.toml"


class About(BaseModel):
    """What problem.json says: points by check, minutes that it takes somebody who has read the chapter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(min_length=3)
    minutes: int = Field(gt=0, le=600)
    points: dict[str, int] = Field(min_length=1)


@dataclass(frozen=True)
class Wrong:
    """A wrong answer: its name, what is wrong with it, and its code."""

    name: str
    why: str
    code: str


def changed(text: str, changes: Sequence[Sequence[str]]) -> str:
    """A text with each (old, new) replaced; ValueError where an old one does not stand there once.

    >>> changed("a + b", [["+", "-"]])
    'a - b'
    """
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} places for the change of {old!r}")
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Problem:
    """A graded problem and where it lies; its name is "CHAPTER/PROBLEM"."""

    folder: Path
    about: About

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def statement(self) -> str:
        return (self.folder / STATEMENT).read_text(encoding="utf-8")

    @property
    def reference(self) -> Path:
        return self.folder / STAFF / "reference.py"

    @property
    def wrong(self) -> list[Wrong]:
        """Answers that people give, each wrong in one way."""
        told = tomllib.loads((self.folder / STAFF / WRONG).read_text(encoding="utf-8"))
        right = self.reference.read_text(encoding="utf-8")
        return [Wrong(name, entry["why"], changed(right, entry["changes"])) for name, entry in told.items()]


@dataclass(frozen=True)
class Verdict:
    """What one check said of an answer. `refused`: by an assertion, not by a crash."""

    check: str
    points: int
    passed: bool
    refused: bool
    message: str


def assignments() -> Path:
    """The folder that holds the problems, by chapter."""
    return home() / "notebooks" / "assignments"


def find_all(folder: Path | None = None) -> list[Problem]:
    """All problems under a folder, by name."""
    return [load(path.parent) for path in sorted((folder or assignments()).glob(f"*/*/{ABOUT}"))]


def find(name: str, folder: Path | None = None) -> Problem:
    """A problem by its name, such as "02_packing/at_most_k".

    Raises UserError for a name that isn't there, with the nearest one.
    """
    there = {problem.name: problem for problem in find_all(folder)}
    if name not in there:
        raise UserError(f"no problem {name!r}", nearest(name, list(there)) if there else "get the assignments folder")
    return there[name]


def load(folder: Path) -> Problem:
    """A problem from its folder. Raises UserError for a problem.json that doesn't fit."""
    path = folder / ABOUT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} can't be read as JSON ({problem})", "restore it") from None
    return Problem(folder, validated(About, values))


def checks(problem: Problem) -> dict[str, Callable[[ModuleType], None]]:
    """A problem's checks by name, in the order in which they stand. Raises UserError unless each has its points."""
    module = imported(problem.folder / CHECKS, f"checks_{problem.folder.name}")
    found = {name: thing for name, thing in vars(module).items() if name.startswith("check_") and callable(thing)}
    if set(found) != set(problem.about.points):
        raise UserError(f"{problem.name}: checks {sorted(found)}", f"give points to the same ones in {ABOUT}")
    return found


def judge(problem: Problem, answer: Path) -> list[Verdict]:
    """What each check says of an answer, a Python file that is run in this process (so only the reader's own).

    An answer that can't be imported fails every check, with the reason. Taught in chapter 07_pretrain.
    """
    try:
        module = imported(answer, f"answer_{problem.folder.name}")
    except Exception as error:
        said = f"the file can't be imported: {type(error).__name__}: {error}"
        return [Verdict(name, points, False, False, said) for name, points in problem.about.points.items()]
    return [_verdict(problem, name, check, module) for name, check in checks(problem).items()]


def _verdict(problem: Problem, name: str, check: Callable[[ModuleType], None], answer: ModuleType) -> Verdict:
    points = problem.about.points[name]
    try:
        check(answer)
    except AssertionError as error:
        return Verdict(name, points, False, True, str(error) or f"{name} found a fault and can't say which")
    except NotImplementedError:
        return Verdict(name, points, False, False, "not written yet")
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} (line {at.lineno} of {Path(at.filename).name})"
        return Verdict(name, points, False, False, said)
    return Verdict(name, points, True, False, inspect.getdoc(check) or "")


def show(name: str) -> None:
    """Display a problem's statement, and how an answer is judged.

    Taught in chapter 07_pretrain.
    """
    problem = find(name)
    about = problem.about
    how = (
        f"Copy `{problem.folder / STUB}`, fill it in, and judge your file here:\n\n"
        f'```python\nproblems.report("{name}", "/path/to/your_answer.py")\n```'
    )
    price = f"{about.title} ({sum(about.points.values())} points, about {about.minutes} minutes)"
    show_text(f"**{price}**\n\n{problem.statement.strip()}\n\n{how}")


def report(name: str, answer: str) -> list[Verdict]:
    """Judge an answer and print a line for each check. Taught in chapter 07_pretrain."""
    verdicts = judge(find(name), Path(answer).expanduser())
    for verdict in verdicts:
        mark = f"{verdict.points if verdict.passed else 0}/{verdict.points}"
        print(f"{mark:>6}  {verdict.check}: {verdict.message}")
    return verdicts


def imported(path: Path, name: str) -> ModuleType:
    """A Python file as a new module, whatever was imported from there before. Raises what the file raises.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "answer.py"
    >>> _ = file.write_text("two = 1 + 1")
    >>> imported(file, "answer").two
    2
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise UserError(f"{path} is no Python file", "give the path of your answer, a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of an answer look their module up there
    spec.loader.exec_module(module)
    return module
