"""Wishes in one line: typed, quoted, refused with the nearest name, never a traceback."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from nanolearn.errors import UserError
from nanolearn.overrides import parse, validated


class Wishes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    rate: float = 0.0
    compile: bool = False
    data: str = ""
    devices: int | str = 1


FIELDS = Wishes.model_fields


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("steps=5", {"steps": 5}),
        ("  steps=5\n rate=1e-3 ", {"steps": 5, "rate": 0.001}),
        ("steps=1e9", {"steps": 1_000_000_000}),
        ("steps=5.0", {"steps": 5}),
        ("rate=20", {"rate": 20.0}),
        ("compile=true", {"compile": True}),
        ("compile=False", {"compile": False}),
        ("data='my own texts'", {"data": "my own texts"}),
        ('data="a=b"', {"data": "a=b"}),
        (r"data=C:\texts\new", {"data": r"C:\texts\new"}),
        ("data=#1", {"data": "#1"}),
        ("data=", {"data": ""}),
    ],
)
def test_values_take_the_type_of_their_field(text, expected):
    found = parse(text, FIELDS)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=5", "unknown override 'step': did you mean steps"),
        ("qqqq=5", "use one of steps, rate"),
        ("steps", "write steps=VALUE"),
        ("steps=many", "give a valid integer"),
        ("steps=5.5", "give a valid integer"),
        ("steps=", "give a valid integer"),
        ("steps=1e999", "give a valid integer"),
        ("compile=perhaps", "give a valid boolean"),
        ("steps=1 steps=2", "given twice"),
        ("data='open", "never close"),
        ("depth=3", "depth is elsewhere"),
    ],
)
def test_n1_a_wish_that_is_misread_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse(text, FIELDS, {"depth": "depth is elsewhere"})


@given(st.text(max_size=40))
def test_any_line_is_read_or_refused(text):
    with contextlib.suppress(UserError):
        assert set(parse(text, FIELDS)) <= set(FIELDS)


@given(st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_come_back(steps, rate):
    assert parse(f"steps={steps} rate={rate!r}", FIELDS) == {"steps": steps, "rate": rate}


def test_a_model_is_filled_or_refused_in_one_line():
    assert validated(Wishes, {"steps": 3}).steps == 3
    with pytest.raises(UserError, match="unknown 'stepz': did you mean steps"):
        validated(Wishes, {"stepz": 3})
    with pytest.raises(UserError, match="steps='x': give a valid integer"):
        validated(Wishes, {"steps": "x"})
