"""Byte-pair encoding with protected spans: your answer goes here."""

from collections.abc import Mapping, Sequence


def learn(pieces: Mapping[bytes, int], merges: int, protected: Sequence[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The merges in the order in which they are learned, each as (left, right); at most `merges` of them.

    pieces: strings of bytes, at least one byte each, with their counts. protected: strings that stay whole, not empty.
    The rules are in README.md.
    """
    raise NotImplementedError
