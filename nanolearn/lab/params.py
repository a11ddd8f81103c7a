"""A notebook's parameters: one typed declaration, checked before any work.

papermill injects whatever it is given and only logs a name that it doesn't know, so a run with `-p dept
24` would spend hours at the default depth. The declaration is the notebook's own cell of annotated
literals; `check` compares it with the cell that papermill injected (IPython keeps both in `In`). In
JupyterLab nothing is injected, and the same check then holds the edited cell to its own annotations. This
module imports nothing heavy: a mistyped name is refused in the first second, before torch is loaded.
"""

import ast
import difflib
from collections.abc import MutableMapping, Sequence
from typing import Any

from nanolearn.errors import UserError

INJECTED = "# Parameters"  # the first line of the cell that papermill writes
ALLOWED = {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH", "PAPERMILL_OUTPUT_DIR_PATH"}
TYPES = {"int": int, "float": float, "bool": bool, "str": str}
WORDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text"}


def check(namespace: MutableMapping[str, Any]) -> dict[str, Any]:
    """Hold a notebook's parameters to their declaration; call it as `params.check(globals())`.

    Returns the checked values and also puts them back into `namespace` (papermill's "true" becomes True).
    Raises UserError for an unknown name, a value of another type, or a declaration that isn't literal.

    >>> cells = ["depth: int = 4", "# Parameters\\ndept = 24"]
    >>> check({"In": cells, "depth": 4, "dept": 24})
    Traceback (most recent call last):
    nanolearn.errors.UserError: unknown parameter 'dept': did you mean 'depth'? (this notebook has: depth)
    >>> check({"In": ["depth: int = 4"], "depth": 8})
    {'depth': 8}

    Taught in chapter 07_pretrain.
    """
    cells = namespace.get("In", [])
    declared = declaration(cells)
    for name in injected(cells):
        if name not in declared and name not in ALLOWED:
            raise unknown(name, declared)
    checked = {name: _fit(name, kind, namespace[name]) for name, kind in declared.items()}
    namespace.update(checked)
    return checked


def declaration(cells: Sequence[str]) -> dict[str, str]:
    """What the parameters cell (the last one made of annotated assignments only) declares: name to type.

    >>> declaration(["depth: int = 4  # layers", "print(1)"])
    {'depth': 'int'}
    """
    for source in reversed(cells):
        body = _statements(source)
        declared = [line for line in body if isinstance(line, ast.AnnAssign)]
        if declared and len(declared) == len(body):
            return dict(_declared(line) for line in declared)
    raise UserError("no parameters are declared", "run the parameters cell first (lines like `depth: int = 4`)")


def injected(cells: Sequence[str]) -> list[str]:
    """The names in the newest cell that papermill injected; none where nothing was injected.

    >>> injected(["depth: int = 4", "# Parameters\\ndepth = 8\\nseed = 1"])
    ['depth', 'seed']
    """
    for source in reversed(cells):
        if source.lstrip().startswith(INJECTED):
            assigned = [line for line in _statements(source) if isinstance(line, ast.Assign)]
            return [target.id for line in assigned for target in line.targets if isinstance(target, ast.Name)]
    return []


def unknown(name: str, known: Sequence[str] | dict[str, str]) -> UserError:
    """The error for a name that isn't declared, with the nearest one that is.

    >>> str(unknown("sede", ["seed", "depth"]))
    "unknown parameter 'sede': did you mean 'seed'? (this notebook has: seed, depth)"
    """
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? (this notebook has: {', '.join(known)})" if near else f"use {', '.join(known)}"
    return UserError(f"unknown parameter {name!r}", hint)


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:  # a cell with a magic, or one that the reader is still writing
        return []


def _declared(line: ast.AnnAssign) -> tuple[str, str]:
    name, kind = ast.unparse(line.target), ast.unparse(line.annotation)
    if kind not in TYPES:
        raise UserError(f"parameter {name!r} is declared as {kind}", f"use one of {', '.join(TYPES)}")
    try:
        ast.literal_eval(line.value)  # type: ignore[arg-type]
    except (ValueError, TypeError) as problem:
        # papermill's cell comes after this one: a value computed here would keep its old inputs.
        raise UserError(f"parameter {name!r} is computed", "write a literal; compute in a later cell") from problem
    return name, kind


def _fit(name: str, kind: str, value: Any) -> Any:
    if kind == "float" and type(value) is int:
        return float(value)
    if kind == "bool" and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) is not TYPES[kind]:
        remedy = f"give {WORDS[kind]}" + (f" (papermill: -r {name} {value})" if kind == "str" else "")
        raise UserError(f"parameter {name} = {value!r} is a {type(value).__name__}", remedy)
    return value
