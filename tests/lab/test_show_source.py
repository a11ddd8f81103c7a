"""Source shown in a chapter is the package's own."""

import inspect

from nanolearn import rng
from nanolearn.errors import UserError
from nanolearn.lab.show_source import show_source, source


def test_text_and_place_are_those_of_the_file():
    place, text = source(rng.stream)
    path, line = place.split(":")
    assert path == "nanolearn/rng.py"
    assert inspect.getsource(rng).splitlines()[int(line) - 1] == text.splitlines()[0]


def test_classes_and_modules_work_too():
    assert source(UserError)[1].startswith("class UserError")
    assert source(rng) == ("nanolearn/rng.py:1", inspect.getsource(rng).rstrip())


def test_it_is_shown_as_a_python_block(monkeypatch):
    shown = []
    monkeypatch.setattr("nanolearn.lab.show_source.show_text", shown.append)
    show_source(rng.key)
    assert shown[0].startswith("`nanolearn/rng.py:")
    assert "```python\ndef key(" in shown[0]
