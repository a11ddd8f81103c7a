"""The house rules that a program can check: sizes, directions, docstrings, and what may never be written."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "nanolearn").rglob("*.py"))
SCRIPTS = sorted((ROOT / "exec").rglob("*.py"))
LINES = {"nanolearn/train/trainer.py": 500}  # the loop is one story; every other module has 300
FUNCTION_LINES = 40
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each_module(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=name)


def public(tree: ast.Module) -> list[Function | ast.ClassDef]:
    """A module's own functions and classes, without those that begin with an underscore."""
    return [node for node in tree.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")]


def code_lines(function: Function) -> int:
    """Lines of a function from its `def`, without the docstring: an example in it is not complexity."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


@each_module([*MODULES, *SCRIPTS])
def test_a_module_is_small(path):
    assert len(path.read_text().splitlines()) < LINES.get(name(path), 300), "is there a seam?"


@each_module([*MODULES, *SCRIPTS])
def test_a_function_is_small(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]
    assert {f.name: code_lines(f) for f in functions if code_lines(f) > FUNCTION_LINES} == {}


@each_module([path for path in MODULES if path.read_text().strip()])
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module says what it is for"
    assert [node.name for node in public(tree) if not ast.get_docstring(node)] == []


@each_module([path for path in MODULES if "lab" not in path.parts])
def test_a_module_with_functions_shows_an_example_that_runs(path):
    """pytest runs them as doctests. The lab's modules only draw and write, so they have tests instead."""
    functions = [node.name for node in public(ast.parse(path.read_text())) if isinstance(node, Function)]
    assert ">>> " in path.read_text() or functions == []


@each_module([*MODULES, *SCRIPTS])
def test_nothing_that_is_loaded_can_execute_code(path):
    """Promise 4: no pickle in any form, and torch.load only with weights_only=True."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            assert not {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"} & {*modules}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in ("eval", "exec"), f"line {node.lineno}"
            assert called != "torch.load" or given.get("weights_only") == "True", f"line {node.lineno}"
            assert given.get("allow_pickle", "False") == "False", f"line {node.lineno}"
            assert given.get("trust_remote_code", "False") == "False", f"line {node.lineno}"


def test_imports_run_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_contributing_names_every_room():
    rooms = {path.stem for path in (ROOT / "nanolearn").iterdir() if not path.name.startswith("_")}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert rooms - set(re.findall(r"\w+", page[page.index("errors  paths") : page.index("Inside `data`")])) == set()


def test_tests_mirror_the_package():
    """A test file of a room is found by the room's name; whole topics have folders of their own."""
    topics = {"notebooks", "faults", "distributed", "exec", "bench"}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inner = path.relative_to(ROOT / "tests")
        if inner.parts[0] in topics or inner.name in ("test_house.py", "test_packaging.py"):
            continue
        room = ROOT / "nanolearn" / inner.with_name(inner.name.removeprefix("test_"))
        assert room.exists() or room.with_suffix("").is_dir(), f"{name(path)} tests no room of that name"


def committed_files() -> list[Path]:
    """What git holds or would add; all files that a release holds where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


def test_nothing_names_a_machine_or_a_registry():
    """Absolute paths hold on one machine only; hosts are the business of pip and huggingface_hub."""
    paths = ["/" + "work/", "/" + "root/", "/home/" + "[a-z]", "/Users/" + "[a-z]"]
    hosts = [r"\b" + host for host in (r"pypi\.(?:org|io)", r"files\.pythonhosted", r"download\.pytorch")]
    hosts += [r"\b" + host for host in (r"conda\.anaconda", r"registry\.npmjs", r"cdn\.jsdelivr", r"hf\.co/")]
    forbidden = re.compile("|".join([*paths, *hosts]))
    this = Path(__file__).resolve()
    found = [
        f"{name(path)}:{number}: {line.strip()[:100]}"
        for path in committed_files()
        if path != this and path.suffix not in (".png", ".svg", ".parquet", ".arrow")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []
