"""The split is a function of a document's name: the same everywhere, and for any other documents beside it."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.data.split import ONE_IN, RULE, Split, cut_at, hash_of, held_out
from nanolearn.errors import UserError


def dealt(names: list[str], text: str = "some words " * 50) -> tuple[list[str], list[str], str]:
    split = Split()
    for name in names:
        split.see(name)
    sides: dict[str, list[str]] = {"train": [], "val": []}
    for name in names:
        for side, _ in split.sides(name, text):
            sides[side].append(name)
    return sides["train"], sides["val"], split.rule


@given(st.text(st.characters(codec="utf-8")))
def test_the_hash_is_blake2b_read_as_a_big_endian_number(name):
    hexadecimal = hashlib.blake2b(name.encode("utf-8"), digest_size=8).hexdigest()
    assert hash_of(name) == int(hexadecimal, 16)
    assert held_out(name) == (int(hexadecimal, 16) % 20 == 0)


def test_one_document_in_twenty_is_held_out():
    held = sum(held_out(f"source/{i}") for i in range(20_000))
    assert abs(held - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5  # five standard deviations of a fair draw


@given(st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=60))
def test_no_corpus_leaves_a_side_empty(names):
    """With few documents or one, both sides still have text, and the rule used is said."""
    train, val, rule = dealt(sorted(names))
    assert train
    assert val
    if len(names) > 1:
        assert not set(train) & set(val)
        assert set(train) | set(val) == names
    if rule == RULE:
        assert set(val) == {name for name in names if held_out(name)}
    elif len(names) > 1:
        assert len(val) == 1 or len(train) == 0 or len(set(val)) == 1


def test_the_order_of_documents_does_not_matter():
    names = [f"files/{i}" for i in range(7)]
    assert [set(side) for side in dealt(names)[:2]] == [set(side) for side in dealt(names[::-1])[:2]]


def test_many_copies_of_one_text_count_as_a_single_document():
    train, val, rule = dealt(["files/same"] * 3)
    assert (len(train), len(val)) == (3, 3)
    assert rule == "validation is the last 5% of the only document"


@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=5000))
def test_a_single_document_is_cut_without_loss(text):
    try:
        cut = cut_at(text)
    except UserError:
        at = len(text) - max(1, len(text) // ONE_IN)
        assert not (text[:at].strip() and text[at:].strip())
        return
    assert text[:cut].strip()
    assert text[cut:].strip()
    assert len(text) - cut <= max(1, len(text) // ONE_IN)


def test_a_single_document_is_cut_at_a_line_if_one_is_near():
    text = "".join(f"line number {i} of the text\n" for i in range(1000))
    held = text[cut_at(text) :]
    assert held.startswith("line number 9")
    assert 0.03 < len(held) / len(text) <= 0.05


def test_a_document_of_one_letter_can_not_be_split():
    with pytest.raises(UserError, match="too little to hold some out"):
        cut_at("x")
