"""Wrong: every piece counts once, however often it stands in the text."""

from collections import Counter
from collections.abc import Mapping, Sequence


def _runs(piece: bytes, protected: Sequence[bytes]) -> list[list[bytes]]:
    runs: list[list[bytes]] = [[]]
    at = 0
    while at < len(piece):
        here = max((span for span in protected if piece.startswith(span, at)), key=len, default=b"")
        if here:
            runs.append([])
        else:
            runs[-1].append(piece[at : at + 1])
        at += len(here) or 1
    return runs


def _joined(run: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    at = 0
    while at < len(run):
        if tuple(run[at : at + 2]) == pair:
            out.append(run[at] + run[at + 1])
            at += 2
        else:
            out.append(run[at])
            at += 1
    return out


def learn(pieces: Mapping[bytes, int], merges: int, protected: Sequence[bytes] = ()) -> list[tuple[bytes, bytes]]:
    runs = [(run, count) for piece, count in pieces.items() for run in _runs(piece, protected)]
    learned: list[tuple[bytes, bytes]] = []
    while len(learned) < merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for run, count in runs:
            for pair in zip(run, run[1:], strict=False):
                pairs[pair] += 1
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], -len(pair[0] + pair[1]), pair))
        learned.append(best)
        runs = [(_joined(run, best), count) for run, count in runs]
    return learned
