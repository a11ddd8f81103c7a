"""What a notebook leaves behind for whoever started it: the last cell writes it, so its presence means "all ran".

papermill's exit code can't be trusted alone (a cell that ends the kernel quietly exits 0 and skips the rest), so a
headless run counts only if its result file is there. `latest.json` tells `make pretrain` where to look.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanolearn.fetch import replacing
from nanolearn.paths import runs_dir
from nanolearn.train.records import RESULT
from nanolearn.train.viewer import held

LATEST = "latest.json"


def finish(notebook: str, values: Mapping[str, Any], run_dir: Path | None = None) -> None:
    """Write a notebook's results; the only call of a chapter's last cell.

    `values` (plain JSON values) go under the key "notebook" of result.json: in `run_dir`, beside what the trainer wrote
    there, and `runs_dir()/latest.json` is set to this run; else, for a chapter that trains no run, in
    `runs_dir()/chapters/NOTEBOOK`. The place is printed. A run that another process trains is left alone. Raises
    ValueError for NaN or infinity, which JSON hasn't got: in a result they are a fault to find.

    Taught in chapter 07_pretrain.
    """
    folder = run_dir or chapter_dir(notebook)
    if held(folder):
        print(f"run directory: {folder} (another process trains there: nothing was written)")
        return
    path = folder / RESULT
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write(path, {**before, "notebook": {"name": notebook, **values}})
    if run_dir:
        _write(runs_dir() / LATEST, {"run_dir": str(run_dir), "notebook": notebook})
        print(f"run directory: {run_dir}")
    else:
        print(f"results: {path}")


def chapter_dir(notebook: str) -> Path:
    """Where a chapter that trains no run writes what it found.

    >>> chapter_dir("02_packing").parts[-2:]
    ('chapters', '02_packing')
    """
    return runs_dir() / "chapters" / notebook


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
