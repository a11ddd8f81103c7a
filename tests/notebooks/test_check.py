"""The checker refuses bad notebooks: each is a good one with a single fault, and only that fault is found."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nanolearn.lab import check

PARAMETERS = "depth: int = 4  # layers\nseed: int = 0  # of every random number"
SETUP = "from nanolearn.lab import params, results\nparams.check(globals())"
LAST = "results.finish('good', folder, {})"


def good(middle: str = "depth + 1", parameters: str = PARAMETERS, last: str = LAST) -> nbformat.NotebookNode:
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    cells = [new_markdown_cell("# Title"), tagged, *map(new_code_cell, (SETUP, middle, last))]
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def test_a_good_notebook_has_no_fault():
    assert check.faults(good()) == []


BAD = {
    "n2_computed_parameter": (good(parameters="tokens: int = BATCH * 256"), "'tokens' is computed"),
    "n2_bare_parameter": (good(parameters="depth = 4"), "no parameters are declared"),
    "n3_shell_escape": (good("!torchrun bad-flag"), "shell escape"),
    "n3_shell_magic": (good("%%bash\ntorchrun bad-flag"), "shell escape"),
    "n3_captured_shell": (good("files = !ls"), "shell escape"),
    "n3_os_system": (good("import os\nos.system('ls')"), "os.system is a shell escape"),
    "n3_sys_exit": (good("import sys\nif depth:\n    sys.exit(0)"), "ends the kernel quietly"),
    "n3_raise_system_exit": (good("raise SystemExit(0)"), "ends the kernel quietly"),
    "n3_no_result": (good(last="print('done')"), "last cell: it writes the result file"),
    "long_cell": (good("\n".join(["depth"] * 26)), "26 lines; at most 25"),
    "own_process": (good("import subprocess"), "subprocess goes through the package"),
    "own_download": (good("from urllib.request import urlopen"), "goes through the package"),
    "own_plot": (good("import matplotlib.pyplot as plt"), "goes through the package"),
    "two_line_parameter": (good(parameters='overrides: str = (\n    ""\n)'), "one literal a line"),
    "nine_parameters": (good(parameters="\n".join(f"a{i}: int = {i}" for i in range(9))), "at most 8"),
    "half_python": (good("for depth in"), "is no Python"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_notebook_is_refused(name):
    notebook, said = BAD[name]
    found = check.faults(notebook)
    assert len(found) == 1, found
    assert said in found[0]


def test_n1_a_notebook_that_does_not_check_its_parameters_is_refused():
    notebook = good()
    notebook.cells[2].source = "import math"
    assert check.faults(notebook) == ["setup: the cell after the parameters calls params.check(globals())"]


def test_an_untagged_parameters_cell_is_refused():
    notebook = good()
    notebook.cells[1].metadata = {}
    assert check.faults(notebook) == ["parameters: the first code cell, and no other, is tagged `parameters`"]


def test_outputs_hidden_code_and_another_kernel_are_refused():
    notebook = good()
    notebook.cells[2].outputs = [new_output("stream", text="x")]
    notebook.cells[3].metadata = {"tags": ["hide-input"]}
    notebook.metadata.kernelspec.name = "my-env"
    said = check.faults(notebook)
    assert [fault.split(":")[0] for fault in said] == ["cell 2", "cell 3", "kernel"]


def executed(**data) -> nbformat.NotebookNode:
    notebook = good()
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.execution_count = number + 1
    notebook.cells[3].outputs = [new_output("display_data", data=data)]
    return notebook


def test_a_run_with_captioned_figures_is_good():
    page = '<figure><img src="data:x" alt="A falling curve."/><figcaption>Loss.</figcaption></figure>'
    notebook = executed(**{"text/html": page})
    assert check.run_faults(notebook) == []
    assert check.figures(notebook) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"text/html": '<figure><img src="x" alt=""/><figcaption>Loss.</figcaption></figure>'},
            "no alt text",
        ),
        ({"text/html": '<img src="x" alt="A falling curve."/>'}, "no caption"),
        ({"image/png": "aGVsbG8="}, "not shown through plots.show"),
    ],
)
def test_a_figure_without_its_words_is_a_fault(data, said):
    (fault,) = check.run_faults(executed(**data))
    assert said in fault


def test_n3_a_run_that_stops_early_is_a_fault():
    notebook = executed()
    notebook.cells[-1].execution_count = None
    notebook.cells[3].outputs = [new_output("error", ename="UserError", evalue="no disk", traceback=[])]
    assert check.run_faults(notebook) == ["UserError: no disk", "the last cell was not reached"]


CHAPTER = """\
---
kernelspec:
  name: python3
  display_name: Python 3
---
# Title

```{code-cell} ipython3
:tags: [parameters]
depth: int = 4  # layers
```
"""


@pytest.fixture
def pair(tmp_path):
    import jupytext

    text, notebook = tmp_path / "00_x.md", tmp_path / "00_x.ipynb"
    text.write_text(CHAPTER)
    cells = jupytext.reads(CHAPTER, fmt="md:myst")
    nbformat.write(cells, notebook)
    return text, notebook, cells


def test_a_pair_that_agrees(pair):
    assert check.pair_faults(*pair[:2]) == []


@pytest.mark.parametrize("change", ["source", "tags", "type", "cell"])
def test_a_pair_that_differs_is_found(pair, change):
    text, path, notebook = pair
    code = notebook.cells[-1]
    if change == "source":
        code.source += "\nseed: int = 0"
    elif change == "tags":
        code.metadata = {}
    elif change == "type":
        notebook.cells[-1] = new_markdown_cell(code.source)
    else:
        notebook.cells.append(new_code_cell("1"))
    nbformat.write(notebook, path)
    (fault,) = check.pair_faults(text, path)
    assert "make notebooks" in fault


def test_a_chapter_with_all_its_parts_has_no_fault_and_each_missing_one_is_named():
    def chapter(headings=check.PARTS, tasks=3, guess="guess = 2.0", graded='problems.show("a/b")', words=1500):
        task = "```{exercise}\n:label: e\ndo\n```\n````{solution} e\n:class: dropdown\n```python\nx = 1\n```\n````"
        prose = "\n".join(f"## {heading}" for heading in headings) + "\n" + "\n".join([task] * tasks)
        code = [guess, graded, *["1"] * 14]
        return new_notebook(cells=[new_markdown_cell(prose + "\n" + " word" * words), *map(new_code_cell, code)])

    assert check.shape_faults(chapter()) == []
    assert "0 exercises; 3 to 5" in check.shape_faults(chapter(tasks=0))
    assert "headings" in check.shape_faults(chapter(headings=check.PARTS[1:]))[0]
    assert "guess" in check.shape_faults(chapter(guess="x = 1"))[0]
    assert "graded" in check.shape_faults(chapter(graded="1"))[0]
    assert "words" in check.shape_faults(chapter(words=10))[0]
    assert "words" in check.shape_faults(chapter(words=4000))[0]


def test_solutions_become_cells_after_the_last_one():
    page = "````{solution} a\n:class: dropdown\nWhy.\n```python\nx = 1\n```\nand\n```python\ny = x\n```\n````"
    before = good()
    before.cells.insert(1, new_markdown_cell(page))
    after = check.with_solutions(before)
    assert [cell.source for cell in after.cells[len(before.cells) :]] == ["x = 1\ny = x"]
    assert len(before.cells) == 6
