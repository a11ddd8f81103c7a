"""Best fit with at most k documents in a row: your answer goes here."""

Piece = tuple[int, int, int]  # document, start, length: tokens start .. start + length - 1 of that document


def pack_at_most(lengths: list[int], capacity: int, k: int) -> list[list[Piece]]:
    """Rows of at most `k` pieces and at most `capacity` tokens, where a piece takes length + 1; nothing is lost.

    lengths: tokens of each document, without BOS, at least 1. The rules are in README.md.
    """
    raise NotImplementedError
