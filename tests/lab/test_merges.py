"""The pictures of chapter 01: nodes where merges are, and a dial that redraws."""

import pytest

from nanolearn.lab import merges

RANK = {b"lo": 256, b"low": 257, b"er": 258, b"lower": 259}
STEPS = [(0, b"lo"), (0, b"low"), (1, b"er"), (0, b"lower")]


def test_a_tree_has_a_node_for_each_byte_and_each_merge():
    axes = merges.tree(b"lower", STEPS, RANK).axes[0]
    said = [text.get_text() for text in axes.texts]
    assert said == ["l", "o", "w", "e", "r", "lo\n256", "low\n257", "er\n258", "lower\n259"]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights["lower\n259"] == 1 + max(heights["low\n257"], heights["er\n258"]) == 3
    assert len(axes.lines) == 2 * len(STEPS)


def test_a_piece_that_stays_bytes_is_a_row_of_leaves():
    axes = merges.tree("é".encode(), [], RANK).axes[0]
    assert [text.get_text() for text in axes.texts] == ["C3", "A9"]
    assert axes.get_title(loc="left") == "From 2 bytes to 2 tokens in 0 merges"


@pytest.mark.parametrize("token, said", [(b"a b", "a_b"), (b"\n", "0A"), ("日".encode(), "日"), (b"\x80", "80")])
def test_any_token_can_be_printed(token, said):
    assert merges.readable(token) == said


def test_each_curve_is_relative_to_its_own_least():
    left, right = merges.sizes([256, 512, 1024], [1.0, 1.5, 1.8], {"a": [8.0, 4.0, 6.0]}, "FLOP").axes
    assert right.lines[0].get_ydata().tolist() == [2.0, 1.0, 1.5]
    assert right.lines[1].get_xdata().tolist() == [512]
    assert left.get_ylabel() == "bytes a token"


def test_the_dial_draws_what_its_controls_say():
    dial = merges.dial("lower", lambda piece, limit: STEPS[:limit] if piece == b"lower" else [], RANK)
    text, limit, picture = dial.children
    limit.value = 2
    assert "with the first 2 merges: 3 tokens" in picture.value
    text.value = "low"
    assert "low&#x27; with the first 2 merges: 3 tokens" in picture.value
