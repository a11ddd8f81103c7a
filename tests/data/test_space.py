"""A bound on disk: what is needed last goes first, and only what can be had again."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from nanolearn.data.shard import token_file
from nanolearn.data.space import Space
from nanolearn.errors import UserError
from nanolearn.fetch import locked

SIZE = 1000


class Plain:
    """A source that lies on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, shard: str) -> Path:
        return self.folder / f"{shard}.parquet"

    def shards(self, split: str) -> tuple[str, ...]:
        return ("held",) if split == "val" else NAMES


class Hub(Plain):
    """A source whose text was fetched."""

    def fetched(self, shard: str) -> tuple[Path, ...]:
        return (self.text(shard),)


NAMES = tuple(f"shard_{number}" for number in range(6))
ORDER = [2, 4, 0, 1, 5, 3]


@pytest.fixture(params=[Hub, Plain])
def source(request, tmp_path):
    source = request.param(tmp_path / "text")
    source.folder.mkdir()
    (tmp_path / "tokens").mkdir()
    for name in (*NAMES, "held"):
        source.text(name).write_bytes(bytes(SIZE))
        token_file(tmp_path / "tokens", name).write_bytes(bytes(SIZE))
    return source


def space(source: Plain, bound: float, said: list[str]) -> Space:
    return Space(source, NAMES, source.folder.parent / "tokens", bound, said.append)


def left(source: Plain) -> tuple[list[str], list[str]]:
    """The shards whose text, and whose tokens, are there."""
    tokens = source.folder.parent / "tokens"
    names = [*NAMES, "held"]
    return [n for n in names if source.text(n).exists()], [n for n in names if token_file(tokens, n).exists()]


def names(indices: list[int]) -> list[str]:
    return [*(f"shard_{index}" for index in sorted(indices)), "held"]


@pytest.mark.parametrize("kept", range(7))
def test_what_rows_need_last_goes_first(source, kept):
    """Never the shards that they need now, nor validation, nor a person's own text."""
    said = []
    each = 2 * SIZE if isinstance(source, Hub) else SIZE
    space(source, (kept + 1) * each, said).make_room(ORDER, needed=3)
    text, tokens = left(source)
    assert tokens == names(ORDER[: max(kept, 3)])
    assert text == (tokens if isinstance(source, Hub) else names(ORDER))
    assert len(said) == (kept < 6) + (kept < 3)
    if kept < 6:
        assert "shard_3 (" in said[0]
    if kept < 3:
        assert "is less than the shards that rows need now" in said[1]


def test_room_is_left_for_the_shards_that_are_yet_to_be_made(source):
    token_file(source.folder.parent / "tokens", "shard_4").unlink()
    each = 2 * SIZE if isinstance(source, Hub) else SIZE
    space(source, 6 * each, []).make_room(ORDER, needed=3)
    assert "shard_3" not in left(source)[1]
    assert "shard_5" not in left(source)[1] or isinstance(source, Plain)


def test_the_shard_that_another_rank_may_still_read_stays(source):
    bounded = space(source, 1, [])
    bounded.make_room([0, 1, 2, 3, 4, 5], needed=1)
    assert left(source)[1] == names([0])
    for name in NAMES:
        token_file(source.folder.parent / "tokens", name).write_bytes(bytes(SIZE))
    bounded.make_room([1, 2, 3, 4, 5, 0], needed=1)
    assert left(source)[1] == names([0, 1])
    assert bounded.dropped == 9


def test_a_shard_that_is_being_made_stays(source):
    said = []
    with locked(token_file(source.folder.parent / "tokens", "shard_3")):
        space(source, 5.9 * SIZE, said).make_room(ORDER, needed=1)
    text, tokens = left(source)
    assert "shard_3" in tokens
    assert "shard_3" in text, "whoever makes tokens reads the text"
    assert "shard_5" not in tokens


def test_text_that_is_being_fetched_stays(source):
    with locked(source.text("shard_3")):
        space(source, 1, []).make_room(ORDER, needed=1)
    text, tokens = left(source)
    assert "shard_3" in text
    assert tokens == names(ORDER[:1])


def test_drops_are_counted_and_the_first_is_said(source):
    said = []
    bounded = space(source, 1, said)
    bounded.make_room(ORDER, needed=1)
    assert bounded.dropped == 5
    assert [line for line in said if "is dropped" in line] == said[:1]
    bounded.make_room(ORDER, needed=1)
    assert (bounded.dropped, len(said)) == (5, 2)


def test_what_belongs_to_another_person_stays_and_is_counted(source, monkeypatch):
    """A cache that several people share: their files can't be locked, and that ends nobody's run."""

    @contextmanager
    def refusing(path, wait=True):
        if path.stem == "shard_5":
            raise UserError(f"{path} can't be written", "ask its owner")
        yield

    monkeypatch.setattr("nanolearn.data.space.locked", refusing)
    space(source, 1, []).make_room(ORDER, needed=1)
    assert left(source)[1] == names([ORDER[0], 5])
