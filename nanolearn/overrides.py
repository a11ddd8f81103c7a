"""One line of wishes, "micro_batch=64 ratio=20 window=L", read by the types of the fields that it names.

A notebook has at most eight parameters; everything else goes through its `overrides`. A wish that is
misread trains the wrong model for hours, so each value is parsed by its field's own type, and an unknown
name is refused with the nearest one there is. This module knows no field: a caller hands in the models that
declare them.
"""

import difflib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from nanolearn.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def nearest(name: str, known: Mapping[str, Any] | list[str], n: int = 1) -> str:
    """ "did you mean ...?" or, when nothing is alike, all names.

    >>> nearest("micro_bach", ["micro_batch", "seed"])
    'did you mean micro_batch?'
    """
    near = difflib.get_close_matches(name.lower(), list(known), n=n, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"


def parse(text: str, fields: Mapping[str, FieldInfo], elsewhere: Mapping[str, str] = {}) -> dict[str, Any]:
    """Words name=value to typed values; quotes keep spaces together. `elsewhere` says where other names
    belong.

    Raises UserError for an unknown name, a value its field can't hold, a name given twice, an open quote.

    >>> class Wishes(BaseModel):
    ...     steps: int = 0
    ...     data: str = ""
    >>> parse("steps=1e3 data='my texts'", Wishes.model_fields)
    {'steps': 1000, 'data': 'my texts'}

    Taught in chapter 07_pretrain.
    """
    found: dict[str, Any] = {}
    for word in _split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"override {word!r} has no value", f"write {name}=VALUE")
        if name in elsewhere:
            raise UserError(f"override {name!r} is a parameter of its own", elsewhere[name])
        if name not in fields:
            raise UserError(f"unknown override {name!r}", nearest(name, fields))
        if name in found:
            raise UserError(f"override {name!r} is given twice", "give it once")
        found[name] = _typed(name, value, fields[name])
    return found


def _split(text: str) -> list[str]:
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters, words.escape = (
        True,
        "",
        "",
    )  # a Windows path keeps its backslashes
    try:
        return list(words)
    except ValueError:
        raise UserError(f"overrides {text!r} open a quote and never close it", "close it") from None


def bounded(field: FieldInfo) -> Any:
    """A field's type with its bounds, which pydantic keeps apart from the annotation.

    >>> from pydantic import Field
    >>> class Wishes(BaseModel):
    ...     steps: int = Field(gt=0)
    >>> bounded(Wishes.model_fields["steps"]) == Annotated[int, *Wishes.model_fields["steps"].metadata]
    True
    """
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _typed(name: str, text: str, field: FieldInfo) -> Any:
    # No field of ours has a use for an infinite number, and "nan" compares false with every bound.
    adapter: TypeAdapter[Any] = TypeAdapter(bounded(field), config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(text)
    except ValidationError as problem:
        # "1e9" is how people write tokens, and not a whole number to pydantic.
        try:
            number = float(text)
            return adapter.validate_python(int(number) if number.is_integer() else number)
        except (ValueError, OverflowError):
            raise UserError(f"override {name}={text!r}", _said(problem)) from None


def validated(model: type[Model], values: Mapping[str, Any]) -> Model:
    """A pydantic model from values, with its complaint as one line that names the field.

    >>> class Wishes(BaseModel):
    ...     steps: int = 0
    >>> validated(Wishes, {"steps": "many"})
    Traceback (most recent call last):
    nanolearn.errors.UserError: steps='many': give a valid integer
    """
    try:
        return model(**values)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(f"unknown {name!r}", nearest(name, model.model_fields)) from None
        given = "" if first["type"] == "missing" else f"={first['input']!r}"
        raise UserError(f"{name}{given}", _said(problem)) from None


def _said(problem: ValidationError) -> str:
    """pydantic's sentence as what to do: "Input should be a valid integer, ..." -> "give a valid integer".

    >>> try:
    ...     TypeAdapter(bool).validate_python("perhaps")
    ... except ValidationError as e:
    ...     print(_said(e))
    give a valid boolean
    """
    errors = problem.errors()
    wanted = [
        e["ctx"]["expected"]
        if e["type"] == "literal_error"
        else e["msg"].split(",")[0].removeprefix("Input should be ")
        for e in errors
    ]
    wanted = [f"a number {said}" if said.startswith(("greater", "less")) else said for said in wanted]
    return "give " + " or ".join(dict.fromkeys(wanted)) if wanted else str(problem)


def loaded(model: type[Model], path: Path) -> Model:
    """A model from its JSON file. Raises UserError, naming what is wrong. Taught in chapter 07_pretrain."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} can't be read as JSON ({problem})", "restore it, or start a new run") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no {model.__name__}", "restore it, or start a new run")
    return validated(model, values)
