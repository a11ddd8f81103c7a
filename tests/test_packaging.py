"""pyproject.toml, constraints.txt, environment.yml, Makefile, README and the built wheel agree (N7, N8)."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
DECLARED = [*CORE, *(requirement for extra in EXTRAS.values() for requirement in extra)]
PIN_LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, version in (line.split("==") for line in PIN_LINES)}
# Packages that torch's accelerator builds bring: their versions are the builds' own affair.
OF_A_BUILD = ("nvidia-", "cuda-", "triton", "pytorch-triton", "rocm")
ROOMS_OF_AN_EXTRA = {"chat": "chat"}  # the only rooms that may import what an extra brings


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_the_pinned_version_lies_in_the_declared_range(requirement):
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)], prereleases=True)


def test_every_requirement_says_why():
    lines = [line for line in PYPROJECT.splitlines() if re.match(r'    "[a-z_0-9-]+>=', line, re.I)]
    assert len(lines) == len(DECLARED)
    assert [line for line in lines if not re.search(r'",\s+# \w.+\w', line)] == []


def test_n8_torch_is_a_range_in_pyproject_and_a_plain_pin_in_constraints():
    torch = next(requirement for requirement in CORE if requirement.name == "torch")
    assert {specifier.operator for specifier in torch.specifier} == {">="}
    assert "torch==2.13.0" in PIN_LINES


def test_constraints_are_plain_pins_for_any_machine():
    assert [line for line in PIN_LINES if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)] == []
    assert [name for name in PINS if name.startswith(OF_A_BUILD) or name in ("pip", "nanolearn")] == []
    assert len(PINS) == len(PIN_LINES)


def closure(requirements: list[Requirement]) -> set[str]:
    """Names of all installed packages that these requirements reach."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in requirements]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            needs = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue  # it belongs to an extra that is not installed here
        for own in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            if not name.startswith(OF_A_BUILD):
                seen.add((name, own))
                todo += [(Requirement(line), own) for line in needs]
    return {name for name, _ in seen}


def test_constraints_pin_everything_that_an_installation_reaches():
    reached = closure(DECLARED)
    assert len(reached) > 50
    assert reached - set(PINS) == set()


def test_environment_yml_installs_what_pyproject_lists():
    """Not run with conda here: its Python, its names and its pip lines are compared instead."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    names = {Requirement(item).name: Requirement(item).specifier for item in conda}
    assert set(names) == {"python", "pip"}
    oldest = SpecifierSet(PROJECT["requires-python"])
    assert all(oldest.contains(Version(s.version)) for s in names["python"] if s.operator == ">=")
    assert ">=" in {specifier.operator for specifier in names["python"]}
    (line,) = pip
    extras = re.fullmatch(r"-e \.\[(.+)\]", line).group(1).split(",")
    assert set(extras) <= set(EXTRAS)
    assert environment["name"] == PROJECT["name"]


def imported_packages(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"nanolearn"}


def test_what_is_imported_is_declared():
    """A package that comes only because another needs it can leave with the other's next version."""
    distributions = importlib.metadata.packages_distributions()
    for path in (ROOT / "nanolearn").rglob("*.py"):
        room = path.relative_to(ROOT / "nanolearn").parts[0].removesuffix(".py")
        allowed = [*CORE, *EXTRAS.get(ROOMS_OF_AN_EXTRA.get(room, ""), [])]
        names = {canonicalize_name(requirement.name) for requirement in allowed}
        for package in imported_packages(path):
            owners = {canonicalize_name(owner) for owner in distributions.get(package, [package])}
            assert owners & names, f"{path.relative_to(ROOT)} imports {package}, which pyproject.toml lacks"


def test_the_console_script_exists():
    module, function = PROJECT["scripts"]["nanolearn"].split(":")
    source = ROOT / module.replace(".", "/")
    tree = ast.parse((source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def notebook_imports() -> dict[str, set[str]]:
    """What the chapters take from the package: module -> names ("" for the module itself)."""
    wanted: dict[str, set[str]] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] != "code":
                continue
            for node in ast.walk(ast.parse("".join(cell["source"]))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nanolearn":
                    wanted.setdefault(node.module, set()).update(alias.name for alias in node.names)
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name.split(".")[0] == "nanolearn":
                            wanted.setdefault(alias.name, set())
    return wanted


@pytest.mark.slow
def test_n7_the_built_wheel_holds_the_package_and_all_that_the_notebooks_import(tmp_path):
    """Built and unpacked elsewhere; then every module, and every name that a notebook takes, is imported."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if name.startswith("nanolearn/")}
        file.extractall(tmp_path / "wheel")
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nanolearn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == here
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sorted(here)]
    checks = [f"import {module}" for module in modules if not module.endswith(".__main__")]
    checks += [f"from {module} import {name}" for module, names in notebook_imports().items() for name in names]
    checks += ["import nanolearn", f"assert nanolearn.__file__.startswith({str(tmp_path)!r})"]
    script = "\n".join(checks)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "wheel")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(), re.M))
        assert named <= targets, page
    assert {"pretrain", "test", "lab", "notebooks", "lint", "help"} <= targets


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "exec/README.md", "Makefile", "environment.yml"])
def test_n8_no_documented_command_can_replace_an_installed_torch(page):
    """pip leaves an installed torch alone as long as nothing pins, upgrades, or adds a second index."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if re.search(r"\bpip install\b|-e \.", line)]
    for line in lines:
        assert not re.search(r"constraints\.txt|--upgrade|\s-U\b|--extra-index-url|--force|torch==", line), line
