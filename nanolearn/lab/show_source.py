"""Show the package's own code inside a chapter: what is read there is what runs, so it can't fall out of date."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from nanolearn.lab.plots import show_text
from nanolearn.paths import home

Source = Callable | type | ModuleType


def source(thing: Source) -> tuple[str, str]:
    """Where a function, class or module of the package stands ("nanolearn/rng.py:36") and its text.

    >>> from nanolearn.rng import stream
    >>> place, text = source(stream)
    >>> place.split(":")[0], text.split("(")[0]
    ('nanolearn/rng.py', 'def stream')
    """
    lines, start = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    package = Path(__file__).resolve().parent.parent
    shown = path.relative_to(package.parent) if path.is_relative_to(package) else path.relative_to(home())
    return f"{shown.as_posix()}:{max(start, 1)}", "".join(lines).rstrip()


def show_source(thing: Source) -> None:
    """Display a piece of the package with the file and line where it stands.

    Taught in chapter 07_pretrain.
    """
    place, text = source(thing)
    show_text(f"`{place}`\n\n```python\n{text}\n```")
