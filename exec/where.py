"""Says where a headless run of a notebook left its results, or that it never came to its last cell.

papermill exits 0 also when a cell ends the kernel quietly, so its word is not taken: the last cell of a
chapter writes runs/latest.json, and that file has to be younger than the notebook's start.
"""

import json
import sys
from datetime import datetime
from pathlib import Path

from nanolearn.paths import runs_dir


def where(notebook: Path, latest: Path) -> str:
    """Two lines: the executed notebook and its run directory. ValueError if the last cell wrote nothing."""
    started = datetime.fromisoformat(json.loads(notebook.read_text())["metadata"]["papermill"]["start_time"])
    if not latest.exists() or latest.stat().st_mtime < started.timestamp():
        raise ValueError(f"{notebook} ended before its last cell: open it to see where")
    run_dir = json.loads(latest.read_text())["run_dir"]
    return f"executed notebook: {notebook.resolve()}\nrun directory:     {run_dir}"


if __name__ == "__main__":
    try:
        print(where(Path(sys.argv[1]), runs_dir() / "latest.json"))
    except ValueError as error:
        sys.exit(str(error))
