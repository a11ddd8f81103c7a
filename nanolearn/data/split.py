"""Which documents are held out for validation: a function of each document's name, never of a draw or a position.

The same document is on the same side on every machine, and stays there when others are added or removed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from nanolearn.errors import UserError

ONE_IN = 20
RULE = "validation is 1 document in 20, by its hash"


def hash_of(name: str) -> int:
    """The 64-bit blake2b of a name, read as a big-endian number.

    >>> hash_of("sotu/1790-Washington-1") == hash_of("sotu/1790-Washington-1") < 1 << 64
    True

    Taught in chapter 02_packing.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def held_out(ident: str) -> bool:
    """Whether the document of that name ("source/id") is held out.

    >>> sum(held_out(f"example/{i}") for i in range(10_000))
    469

    Taught in chapter 02_packing.
    """
    return hash_of(ident) % ONE_IN == 0


@dataclass
class Split:
    """The split of one corpus. `see` every document's name first; then `sides` deals out the texts.

    A corpus of a few documents can have all of them on one side. Then one document, the one nearest to the rule, is
    held out; of a single document, its last twentieth. Which rule was used is `rule`, and is said aloud.

    >>> split = Split()
    >>> split.see("files/a"), split.rule
    (None, 'validation is the last 5% of the only document')
    >>> list(split.sides("files/a", "word " * 20))[1]
    ('val', 'word ')

    Taught in chapter 02_packing.
    """

    held: int = 0
    kept: int = 0
    only: str = ""
    several: bool = False
    nearest: tuple[int, int, str] = (ONE_IN, 0, "")

    def see(self, ident: str) -> None:
        """Count one document."""
        number = hash_of(ident)
        self.held += number % ONE_IN == 0
        self.kept += number % ONE_IN != 0
        self.nearest = min(self.nearest, (number % ONE_IN, number, ident))
        self.several |= bool(self.only) and ident != self.only
        self.only = self.only or ident

    @property
    def rule(self) -> str:
        """The rule in words."""
        if self.held and self.kept:
            return RULE
        if self.several:
            return "validation is one document, picked by its hash, for there are too few for 1 in 20"
        return "validation is the last 5% of the only document"

    def sides(self, ident: str, text: str) -> Iterator[tuple[str, str]]:
        """("train" or "val", text): one pair, or two for a single document that is cut."""
        if self.held and self.kept:
            yield ("val" if held_out(ident) else "train"), text
        elif self.several:
            yield ("val" if ident == self.nearest[2] else "train"), text
        else:
            cut = cut_at(text)
            yield "train", text[:cut]
            yield "val", text[cut:]


def cut_at(text: str) -> int:
    """Where the last twentieth of a text begins: behind the next line end or space, if one is near.

    Raises UserError if a side would be blank.

    >>> text = "one two three four five six seven eight nine ten " * 4
    >>> text[cut_at(text):]
    'ten '

    Taught in chapter 02_packing.
    """
    cut = len(text) - max(1, len(text) // ONE_IN)
    ends = [at + 1 for at in (text.find("\n", cut, cut + 1000), text.find(" ", cut, cut + 1000)) if at >= 0]
    cut = next((end for end in ends if text[end:].strip()), cut)
    if not (text[:cut].strip() and text[cut:].strip()):
        raise UserError(f"the corpus is one document of {len(text)} characters", "that is too little to hold some out")
    return cut
