"""exec/where.py: a run counts only if the notebook's last cell was reached."""

import json
import os
import runpy
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

where = runpy.run_path(str(Path(__file__).resolve().parent.parent.parent / "exec/where.py"))["where"]


@pytest.fixture
def notebook(tmp_path):
    started = datetime(2026, 1, 1, 12, tzinfo=UTC)
    path = tmp_path / "out.ipynb"
    path.write_text(json.dumps({"metadata": {"papermill": {"start_time": started.isoformat()}}}))
    return path, started


def write_latest(folder: Path, when: datetime) -> Path:
    path = folder / "latest.json"
    path.write_text(json.dumps({"run_dir": "/somewhere/runs/gpt-d4", "notebook": "07_pretrain"}))
    os.utime(path, (when.timestamp(), when.timestamp()))
    return path


def test_a_finished_run_is_shown(notebook, tmp_path):
    path, started = notebook
    said = where(path, write_latest(tmp_path, started + timedelta(seconds=5)))
    assert said.splitlines() == [f"executed notebook: {path}", "run directory:     /somewhere/runs/gpt-d4"]


def test_the_result_of_an_earlier_run_is_not_taken_for_this_one(notebook, tmp_path):
    path, started = notebook
    latest = write_latest(tmp_path, started - timedelta(seconds=5))
    with pytest.raises(ValueError, match="ended before its last cell"):
        where(path, latest)


def test_no_result_at_all(notebook, tmp_path):
    with pytest.raises(ValueError, match="ended before its last cell"):
        where(notebook[0], tmp_path / "latest.json")
