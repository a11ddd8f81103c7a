"""A UserError is one line everywhere: as text, and in a notebook."""

from nanolearn.errors import UserError


def test_one_line_says_what_happened_and_what_to_do():
    assert str(UserError("no such shard", "fetch it")) == "no such shard: fetch it"
    assert str(UserError("stopped")) == "stopped"


def test_a_notebook_shows_the_line_and_no_stack():
    assert UserError("a", "b")._render_traceback_() == ["UserError: a: b"]
