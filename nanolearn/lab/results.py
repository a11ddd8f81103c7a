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


def finish(notebook: str, run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write a notebook's results; the only call of a chapter's last cell.

    `values` (plain JSON values) go under the key "notebook" of `run_dir/result.json`, beside what the trainer
    wrote there. `runs_dir()/latest.json` is set to this run, and the place is printed. A run that another process
    trains is left alone. Raises ValueError for NaN or infinity, which JSON hasn't got: in a result they are a fault
    to find.

    Taught in chapter 07_pretrain.
    """
    if held(run_dir):
        print(f"run directory: {run_dir} (another process trains there: nothing was written)")
        return
    path = run_dir / RESULT
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write(path, {**before, "notebook": {"name": notebook, **values}})
    _write(runs_dir() / LATEST, {"run_dir": str(run_dir), "notebook": notebook})
    print(f"run directory: {run_dir}")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
