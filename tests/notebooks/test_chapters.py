"""Every chapter: its text and its notebook agree, both keep the book's rules, and it runs alone inside its budget."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from nanolearn.cli import main
from nanolearn.lab import check

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTERS = sorted((ROOT / "book" / "chapters").glob("[0-9][0-9]_*.md"))
UNFINISHED = {"07_pretrain"}  # it has no exercises and no "Break it" yet
# 07 trains for eight minutes: test_pretrain_notebook runs it at a smaller size, bench/default_run.py as it stands.
MEASURED = [path for path in CHAPTERS if path.stem != "07_pretrain"]
MINUTES, MEMORY = 5.0, 2.0  # of a chapter on two cores; GB of its largest process
TABLE = Path(os.environ.get("NANOLEARN_BUDGETS", ROOT / "out" / "chapters.json"))
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
OFFLINE |= {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "2"}


@pytest.fixture
def fetched_book(embedded_corpus):
    """All that `nanolearn data fetch --book` fetches, in the user's own cache."""
    assert main(["data", "fetch", "--book"]) == 0


def notebook_of(chapter: Path) -> Path:
    return ROOT / "notebooks" / f"{chapter.stem}.ipynb"


def test_there_are_chapters_and_no_notebook_without_one():
    assert CHAPTERS
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == [path.stem for path in CHAPTERS]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_text_and_notebook_agree(chapter):
    assert check.pair_faults(chapter, notebook_of(chapter)) == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_the_notebook_keeps_the_rules(chapter):
    notebook = nbformat.read(notebook_of(chapter), as_version=4)
    nbformat.validate(notebook)
    assert check.faults(notebook) == []
    if chapter.stem in UNFINISHED:
        assert check.shape_faults(notebook), f"{chapter.stem} has all its parts now: take it out of UNFINISHED"
    else:
        assert check.shape_faults(notebook) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chapter", MEASURED, ids=lambda path: path.stem)
def test_the_chapter_runs_alone_inside_its_budget(chapter, fetched_book, tmp_path, monkeypatch, capsys):
    """Headless by papermill's own command, network off, two threads; its folded solutions run after its last cell."""
    monkeypatch.setenv("NANOLEARN_RUNS", str(tmp_path / "runs"))
    grown, out = tmp_path / "grown.ipynb", tmp_path / "out.ipynb"
    nbformat.write(check.with_solutions(nbformat.read(notebook_of(chapter), as_version=4)), grown)
    done, seconds, memory = headless(grown, out)
    assert done == 0, (tmp_path / "log").read_text()[-5000:]
    executed = nbformat.read(out, as_version=4)
    assert check.run_faults(executed) == []
    low, high = check.FIGURES
    assert low <= check.figures(executed) <= high
    written = json.loads((tmp_path / "runs" / "chapters" / chapter.stem / "result.json").read_text())
    assert written["notebook"]["name"] == chapter.stem
    with capsys.disabled():
        print(f"\n{chapter.stem}: {seconds / 60:.1f} minutes, {memory:.2f} GB")
    recorded(chapter.stem, round(seconds / 60, 2), round(memory, 2))
    assert seconds / 60 < MINUTES
    assert memory < MEMORY


def headless(notebook: Path, out: Path) -> tuple[int, float, float]:
    """Exit code, seconds, and GB of the largest process of a papermill run; what it says goes to a file beside it."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(notebook), str(out)]
    begun = time.monotonic()
    with out.with_name("log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | OFFLINE, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)  # the kernel was waited for, so its use is in it
    process.returncode = os.waitstatus_to_exitcode(status)
    kilo = 1 if sys.platform == "darwin" else 1024
    return process.returncode, time.monotonic() - begun, used.ru_maxrss * kilo / 1e9


def recorded(chapter: str, minutes: float, memory: float) -> None:
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(before | {chapter: {"minutes": minutes, "memory_gb": memory}}, indent=1))
