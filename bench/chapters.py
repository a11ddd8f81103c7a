"""What each chapter takes: minutes and the memory of its largest process, by the test that holds it to its budget."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record

ROOT = Path(__file__).resolve().parent.parent
TEST = "tests/notebooks/test_chapters.py::test_the_chapter_runs_alone_inside_its_budget"

if __name__ == "__main__":
    about = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "chapters.json"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", TEST]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"NANOLEARN_BUDGETS": str(table)}, check=True)
        record.write("chapters", "cd bench && python chapters.py", json.loads(table.read_text()), about)
