"""A bound on the disk that a corpus takes: shards that rows will need last are dropped, and fetched again when needed.

A terabyte of text trains on a machine with a tenth of it. What is dropped is only ever what can be had again: token
shards, and text that came from a Hub data set; never a person's own files, and never the validation shard.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from nanolearn.data.shard import token_file
from nanolearn.data.sources import Source
from nanolearn.errors import UserError
from nanolearn.fetch import Held, locked


@runtime_checkable
class Refetched(Protocol):
    """A source whose text can be fetched again."""

    def fetched(self, shard: str) -> tuple[Path, ...]:
        """The files that a shard's text was fetched into, there or not."""


class Space:
    """Holds text and tokens of a corpus below `bound` bytes, as far as the shards that are needed now leave room.

    `names` are the training shards, `folder` is where their tokens lie. `dropped` counts drops.

    Taught in chapter 02_packing.
    """

    def __init__(
        self, source: Source, names: Sequence[str], folder: Path, bound: float, say: Callable[[str], None]
    ) -> None:
        self.source, self.names, self.folder, self.bound, self._say = source, names, folder, bound, say
        self.dropped = 0
        self._present: int | None = None
        self._said_short = False
        self._one = threading.Lock()

    def files(self, name: str) -> tuple[Path, ...]:
        """The files of a shard that may be dropped."""
        text = self.source.fetched(name) if isinstance(self.source, Refetched) else ()
        return (token_file(self.folder, name), *text)

    def size(self, name: str) -> int:
        """Bytes that a shard takes.

        >>> from nanolearn.data.sources import open_source
        >>> Space(open_source("embedded"), ["train_00000"], Path("no-such-folder"), 1e9, print).size("train_00000")
        0
        """
        return sum(size_of(path) for path in self.files(name))

    def make_room(self, order: Sequence[int], needed: int) -> None:
        """Drop shards from the end of `order` (in which rows will need them) until the bound holds.

        The first `needed` stay, and the one that was the first before: another rank may still read it. Room is left
        for those of them that are yet to be made. Says the first drop, and once if what is needed takes more.
        """
        with self._one:
            present, self._present = self._present, order[0]
            stay = {*order[:needed], present}
            sizes = {index: self.size(self.names[index]) for index in order}
            taken = sum(sizes.values()) + sum(self.size(name) for name in self.source.shards("val"))
            coming = sum(not token_file(self.folder, self.names[index]).exists() for index in order[:needed])
            taken += coming * max(sizes.values())
            for index in reversed(order):
                if taken <= self.bound:
                    return
                if sizes[index] and index not in stay:
                    taken -= self._drop(index)
            if taken > self.bound and not self._said_short:
                self._said_short = True
                self._say(
                    f"disk_gb={self.bound / 1e9:g} is less than the shards that rows need now, {taken / 1e9:,.3g} GB:"
                    " nothing more can be dropped"
                )

    def _drop(self, index: int) -> int:
        """Remove a shard's files, unless one is being made; the bytes that are free now."""
        name, freed = self.names[index], 0
        tokens, *text = self.files(name)
        # Whoever makes the tokens holds their lock and reads the text. Some systems keep what is in use, and in a cache
        # of several people one can't drop what is another's: that stays, and is counted.
        kept = (Held, OSError, UserError)
        with suppress(*kept), locked(tokens, wait=False):
            for path in text:
                with suppress(*kept), locked(path, wait=False):
                    freed += _remove(path)
            freed += _remove(tokens)
        if freed and not self.dropped:
            self._say(
                f"disk_gb={self.bound / 1e9:g}: shard {name} ({freed / 1e6:,.3g} MB) is dropped, and others will be; "
                "what rows need again is fetched again"
            )
        self.dropped += bool(freed)
        return freed


def _remove(path: Path) -> int:
    """Remove a file, if it is there; the bytes that are free now."""
    freed = size_of(path)
    path.unlink(missing_ok=True)
    return freed


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none. Taught in chapter 02_packing.

    >>> size_of(Path("no-such-file"))
    0
    """
    try:
        return path.stat().st_size
    except OSError:
        return 0
