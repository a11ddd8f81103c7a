"""What every chapter is held to, as pure functions of a notebook: each returns the faults it finds, in
words.

The tests run these on all chapters, and on small bad notebooks that each must be refused.
"""

import ast
import copy
import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from nanolearn.errors import UserError
from nanolearn.lab import params

MAX_LINES = 25  # a code cell that fits one screen beside its text
MAX_PARAMETERS, MAX_SETUP = 8, 8
CELLS, WORDS, FIGURES = (15, 35), (1200, 3000), (3, 6)  # code cells, words of prose, figures of a chapter
# A chapter's headings, in order; a chapter gives its toy, its measurements and its graded work headings of their own.
PARTS = ("Where we are", "Predict", "Break it", "At full scale", "Exercises", "Summary")
EXERCISES = (3, 5)
LEAVES = {"sys.exit", "os._exit", "exit", "quit", "SystemExit"}
SHELLS = {
    "os.system",
    "os.popen",
    "get_ipython().system",
    "get_ipython().getoutput",
    "get_ipython().run_cell_magic",
}
OUTSIDE = {
    "subprocess",
    "requests",
    "urllib",
    "httpx",
    "matplotlib",
}  # launcher, fetch and plots stand for these
SOLUTION = "solution"  # tags the cells that `with_solutions` adds
HIDDEN = {"hide-input", "hide-cell", "remove-input", "remove-cell"}


def faults(notebook: NotebookNode) -> list[str]:
    """Everything that is wrong with a chapter's notebook before it runs; an empty list is a pass.

    Taught in chapter 07_pretrain.
    """
    cells = [(number, cell) for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    found = [fault for number, cell in cells for fault in _cell_faults(number, cell)]
    found += parameter_faults([cell for _, cell in cells])
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("kernel: the name is python3, the only one that every machine has")
    if not cells or "results.finish(" not in cells[-1][1].source:
        found.append("last cell: it writes the result file with results.finish(...)")
    return found


def parameter_faults(code: list[NotebookNode]) -> list[str]:
    """The first code cell holds the parameters, literal and few; the setup cell after it checks them."""
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0] is not code[0]:
        return ["parameters: the first code cell, and no other, is tagged `parameters`"]
    try:
        declared = params.declaration([tagged[0].source])
    except UserError as problem:
        return [f"parameters: {problem}"]
    found = []
    if len(declared) > MAX_PARAMETERS:
        found.append(f"parameters: {len(declared)} of them; at most {MAX_PARAMETERS}, the rest through overrides")
    if len(tagged[0].source.splitlines()) != len(declared):
        found.append("parameters: one literal a line, with its comment on the same line")
    if len(code) < 2 or "params.check(globals())" not in code[1].source:
        found.append("setup: the cell after the parameters calls params.check(globals())")
    elif len(code[1].source.splitlines()) > MAX_SETUP:
        found.append(f"setup: {len(code[1].source.splitlines())} lines; at most {MAX_SETUP}")
    return found


def shape_faults(notebook: NotebookNode) -> list[str]:
    """Whether a chapter has the size and the parts that CONTRIBUTING names; `faults` says whether its cells are right.

    Taught in chapter 07_pretrain.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    words = len(re.findall(r"[A-Za-z']+", re.sub(r"```.*?```", "", prose, flags=re.S)))
    tasks = re.findall(r"^`{3,}\{exercise\}", prose, flags=re.M)
    counted = {
        "code cells": (len(code), CELLS),
        "words": (words, WORDS),
        "exercises": (len(tasks), EXERCISES),
        "solutions": (len(solutions(notebook)), EXERCISES),
    }
    found = [f"{n} {name}; {low} to {high}" for name, (n, (low, high)) in counted.items() if not low <= n <= high]
    headings = [line.lstrip("# ").strip() for line in prose.splitlines() if line.startswith("## ")]
    there = [part for part in headings if part in PARTS]
    if there != list(PARTS):
        found.append(f"headings {there}; in this order: {list(PARTS)}")
    if not any(re.match(r"guess\b.* = ", line) for cell in code for line in cell.source.splitlines()):
        found.append("predict: no cell asks for a guess")
    if "problems.show(" not in "".join(cell.source for cell in code):
        found.append("exercises: no graded problem is shown with problems.show(...)")
    return found


def solutions(notebook: NotebookNode) -> list[str]:
    """The code of each folded solution, in order: its ```python blocks, joined.

    >>> page = "````{solution} a\\n:class: dropdown\\n```python\\nx = 1\\n```\\n````"
    >>> solutions(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(page)]))
    ['x = 1']
    """
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    folded = re.findall(r"^````\{solution\}(.*?)^````\s*$", prose, flags=re.S | re.M)
    return ["\n".join(re.findall(r"^```python\n(.*?)\n```", text, flags=re.S | re.M)) for text in folded]


def with_solutions(notebook: NotebookNode) -> NotebookNode:
    """The notebook with each solution as a cell after its last one, so that one execution tries chapter and solutions.

    Taught in chapter 07_pretrain.
    """
    grown = copy.deepcopy(notebook)
    grown.cells += [nbformat.v4.new_code_cell(code, metadata={"tags": [SOLUTION]}) for code in solutions(notebook)]
    return grown


def _cell_faults(number: int, cell: NotebookNode) -> list[str]:
    where, lines = f"cell {number}", cell.source.splitlines()
    found = []
    if cell.get("outputs") or cell.get("execution_count"):
        found.append(f"{where}: it holds outputs; run `make notebooks`")
    if len(lines) > MAX_LINES:
        found.append(f"{where}: {len(lines)} lines; at most {MAX_LINES}")
    if HIDDEN & set(cell.metadata.get("tags", [])):
        found.append(f"{where}: hides code from the reader")
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        escape = any(re.match(r"\s*[!%]|.*=\s*!", line) for line in lines)
        return [*found, f"{where}: a shell escape or magic" if escape else f"{where}: is no Python"]
    return found + [f"{where}: {name} {why}" for name, why in sorted(_forbidden(tree))]


def _forbidden(tree: ast.Module) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (alias.name, "goes through the package") for alias in node.names if alias.name.split(".")[0] in OUTSIDE
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OUTSIDE:
            found.add((str(node.module), "goes through the package"))
        elif isinstance(node, ast.Call | ast.Raise):
            target = node.func if isinstance(node, ast.Call) else node.exc
            name = ast.unparse(target) if target else ""
            if name in LEAVES:
                found.add((name, "ends the kernel quietly, and papermill reports success"))
            if name in SHELLS:
                found.add((name, "is a shell escape"))
    return found


def pair_faults(text: Path, notebook: Path) -> list[str]:
    """Differences between a chapter's text and its notebook; time stamps and cell ids don't count."""
    ours, theirs = (_cells(jupytext.read(text)), _cells(nbformat.read(notebook, as_version=4)))
    found = [
        f"{notebook.name} cell {number} differs from {text.name}: run `make notebooks`"
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False))
        if a != b
    ]
    if len(ours) != len(theirs):
        found.append(f"{text.name} has {len(ours)} cells, {notebook.name} {len(theirs)}: run `make notebooks`")
    return found


def _cells(notebook: NotebookNode) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", []))) for cell in notebook.cells]


def run_faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with an executed notebook: an error, an unreached last cell, a wordless figure."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    found = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    if not code or code[-1].execution_count is None:
        found.append("the last cell was not reached")
    for output in outputs:
        page = output.get("data", {}).get("text/html", "")
        if "<img" in page and not (re.search(r'alt="[^"]{10,}"', page) and "<figcaption>" in page):
            found.append("a figure has no alt text or no caption")
        if any(kind.startswith("image/") for kind in output.get("data", {})):
            found.append("a figure is not shown through plots.show")
    return found


def figures(notebook: NotebookNode) -> int:
    """How many figures an executed notebook shows."""
    return sum(
        "<figure" in output.get("data", {}).get("text/html", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
