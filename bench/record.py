"""How a benchmark leaves its figures: one JSON file under bench/results/, with the machine, versions and date."""

import datetime
import json
import os
import platform
from pathlib import Path

import torch

from nanolearn import host

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """What the figures depend on besides the code."""
    return {
        "processor": host.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(host.memory() / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def today() -> str:
    """The date of a measurement."""
    return datetime.date.today().isoformat()


def write(name: str, command: str, figures: dict, about: dict) -> Path:
    """Write and print `bench/results/NAME.json`. `about` comes from `machine()`, called before the measurement."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"date": today(), "command": command, "machine": about, "figures": figures}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    return path
