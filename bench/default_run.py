"""The default run as a reader starts it: papermill on notebook 07 with nothing changed, corpus already fetched.

Asserts what the project promises on two cores: at most 8 minutes from the command to the end, at most 1.75 bits per
byte on the whole validation split, the first step within 15 s, under 2 GB. `--cold` starts with an empty cache as well
and stops after a few steps: it measures the first step only. Leave the machine alone meanwhile.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

from nanolearn.paths import home

NOTEBOOK = home() / "notebooks" / "07_pretrain.ipynb"
MOST = {"minutes": 8.0, "bits_per_byte": 1.75, "first_step_seconds": 15.0, "peak_gb": 2.0}


def papermill(folder: Path, *parameters: str, **environment: str) -> tuple[float, dict]:
    """Wall seconds and the result file of one run of the notebook."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(NOTEBOOK), str(folder / "out.ipynb")]
    begun = time.perf_counter()
    subprocess.run(
        [*command, "-p", "run_dir", str(folder / "run"), *parameters],
        check=True,
        env=os.environ | {"NANOLEARN_RUNS": str(folder)} | environment,
    )
    seconds = time.perf_counter() - begun
    return seconds, json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))


def main() -> None:
    about = record.machine()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "--cold" in sys.argv:
            few = ("-p", "overrides", "steps=2 val_tokens=0")
            _, result = papermill(folder, *few, NANOLEARN_CACHE=str(folder / "cache"))
            figures = {"first_step_seconds": round(result["first_step_seconds"], 1)}
            record.write("default_run_cold", "python bench/default_run.py --cold", figures, about)
            return
        seconds, result = papermill(folder)
    assert result["whole_split"], "the promise is about the whole validation split"
    figures = {
        "minutes": round(seconds / 60, 2),
        "bits_per_byte": round(result["bpb"], 4),
        "first_step_seconds": round(result["first_step_seconds"], 1),
        "peak_gb": round(result["peak_memory"] / 1e9, 2),
        "tokens": result["tokens"],
        "tokens_per_second": round(result["tokens_per_second"]),
        "parameters": result["parameters"],
        "seconds": {name: round(value, 1) for name, value in result["seconds"].items()},
        "samples": result["samples"],
    }
    record.write("default_run", "python bench/default_run.py", figures, about)
    missed = {name: figures[name] for name, most in MOST.items() if figures[name] > most}
    assert not missed, f"above {MOST}: {missed}"


if __name__ == "__main__":
    main()
