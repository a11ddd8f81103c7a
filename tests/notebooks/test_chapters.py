"""Every chapter: its text and its notebook agree, and both keep the book's rules."""

from pathlib import Path

import nbformat
import pytest

from nanolearn.lab import check

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTERS = sorted((ROOT / "book" / "chapters").glob("[0-9][0-9]_*.md"))
CODE_CELLS = range(15, 36)


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
    assert sum(cell.cell_type == "code" for cell in notebook.cells) in CODE_CELLS
