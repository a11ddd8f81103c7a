"""Where things lie on disk: the project's home, downloads and token shards (cache), and runs.

A chapter never holds a relative path: JupyterLab starts in the notebook's folder and papermill in the caller's.
"""

import os
from pathlib import Path


def home() -> Path:
    """The checkout that this package was installed from in editable mode, else the current folder.

    >>> home().is_dir()
    True
    """
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").exists() else Path.cwd()


def cache_dir() -> Path:
    """Downloads, tokenizers and token shards: $NANOLEARN_CACHE, else the user's cache folder.

    Everything here can be deleted; it costs a download or a tokenisation to make it again.

    >>> cache_dir().is_absolute()
    True
    """
    if chosen := os.environ.get("NANOLEARN_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "nanolearn"


def runs_dir() -> Path:
    """Run directories: $NANOLEARN_RUNS, else `runs/` in the project's home.

    >>> runs_dir().is_absolute()
    True
    """
    if chosen := os.environ.get("NANOLEARN_RUNS"):
        return Path(chosen).expanduser().resolve()
    return home() / "runs"
