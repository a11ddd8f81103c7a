"""How documents of all lengths fill rows of one length: packing plans, and the five packers that make them.

A plan is a pure function of one shard's document lengths: every rank computes the same one, none travels or
is saved, and a resumed run finds its place by number. Every piece of a plan is assembled as BOS and then a
slice of one document, so every row begins with BOS, and a document that goes on in another row is given its
BOS again (one token more). *Size* always means tokens with that BOS, *length* tokens without it.

Two rules hold for all packers, so that every row fills exactly `capacity` tokens:
- One token of room is filled by a bare BOS. It costs nothing: a row's last token is only ever a target, and
  there it says that the document has ended.
- A row is padded by `best_fit_pad`, and else only where no document is left: the last row of a shard. Every
  row holds at least one token of text, so a row of nothing but padding can't exist.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanolearn.data.best_fit import Pieces, best_fit_crop, best_fit_pad, best_fit_tail
from nanolearn.errors import UserError


@dataclass(frozen=True, eq=False)
class Plan:
    """Which slice of which document lies where: row r is pieces row_start[r] .. row_start[r + 1] - 1.

    All arrays are int64: `row_start` (rows + 1,), and for each piece its `doc` (index in the shard), `start`
    and `length` in tokens of that document without BOS. `capacity` is T + 1 tokens; `tokens_in` is what the
    documents hold, `tokens_cropped` what the packer threw away; `continued_rows` are the rows that begin
    inside a document.

    >>> plan = pack(np.array([3, 9]), capacity=6, packer="best_fit_tail")
    >>> plan.n_rows, plan.row_start.tolist(), plan.doc.tolist(), plan.start.tolist(), plan.length.tolist()
    (3, [0, 1, 3, 4], [1, 1, 1, 0], [0, 5, 9, 0], [5, 4, 0, 3])

    Taught in chapter 02_packing.
    """

    row_start: np.ndarray  # (R + 1,)
    doc: np.ndarray  # (P,)
    start: np.ndarray  # (P,)
    length: np.ndarray  # (P,)
    capacity: int
    tokens_in: int
    tokens_cropped: int
    continued_rows: int

    @property
    def n_rows(self) -> int:
        """Rows in the plan."""
        return len(self.row_start) - 1

    @property
    def continuations(self) -> int:
        """Pieces that go on with a document which an earlier piece began."""
        return int(np.count_nonzero((self.start > 0) & (self.length > 0)))

    @property
    def utilisation(self) -> float:
        """Share of the rows' room that is filled, BOS included (the rest is padding)."""
        room = self.n_rows * self.capacity
        return (int(self.length.sum()) + len(self.length)) / room if room else 1.0

    @property
    def loss(self) -> float:
        """Share of the documents' tokens that no row holds."""
        return self.tokens_cropped / self.tokens_in if self.tokens_in else 0.0


def pack(lengths: np.ndarray, capacity: int, packer: str = "best_fit_tail") -> Plan:
    """The packing plan of one shard: pure, deterministic, and without any random choice.

    `lengths` (documents,) counts tokens without BOS (a document of 0 gets no piece); `capacity` is T + 1
    tokens. Raises UserError for a packer that isn't in PACKERS, ValueError for a capacity below 2 or a
    negative length.

    >>> pack(np.array([499, 799, 1199, 2499]), 2049, "best_fit_crop").length[:3].tolist()  # + 3 BOS
    [1199, 799, 48]

    Taught in chapter 02_packing.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if packer not in PACKERS:
        raise UserError(f"no packer is called {packer!r}", f"choose one of {', '.join(PACKERS)}")
    if capacity < 2 or (len(lengths) and lengths.min() < 0):
        raise ValueError(f"capacity {capacity} must be 2 or more and no length negative")
    present = np.flatnonzero(lengths)
    if not len(present):
        none = np.empty(0, dtype=np.int64)
        return Plan(np.zeros(1, dtype=np.int64), none, none, none, capacity, 0, 0, 0)
    return _finish(PACKERS[packer](lengths[present], capacity), present, capacity, int(lengths.sum()))


def _finish(pieces: Pieces, present: np.ndarray, capacity: int, tokens_in: int) -> Plan:
    """Close rows that lack one token by a bare BOS, name documents by their index in the shard, and count."""
    first, doc, start, length = pieces
    doc = present[doc]
    end = np.append(first[1:], len(doc))
    short = np.flatnonzero(np.add.reduceat(length + 1, first) == capacity - 1)
    if len(short):
        last = end[short] - 1
        start = np.insert(start, last + 1, start[last] + length[last])
        length = np.insert(length, last + 1, 0)
        doc = np.insert(doc, last + 1, doc[last])
        first = first + np.searchsorted(short, np.arange(len(first)))
    cropped, continued = tokens_in - int(length.sum()), int(np.count_nonzero(start[first]))
    return Plan(np.append(first, len(doc)), doc, start, length, capacity, tokens_in, cropped, continued)


def concatenate(lengths: np.ndarray, capacity: int) -> Pieces:
    """One stream of BOS and documents, cut where a row is full: nothing is lost, every row begins anywhere."""
    begin = np.cumsum(lengths + 1) - (lengths + 1)  # (documents,) where each BOS lies in the stream
    total = int(lengths.sum()) + len(lengths)
    boundaries = set(begin.tolist())
    rows, position = [], 0
    while position < total:
        rows.append(position)
        # A row that begins inside a document spends one token on the BOS that the stream doesn't hold there.
        position += capacity if position in boundaries else capacity - 1
    row_begin = np.array(rows, dtype=np.int64)
    cuts = np.union1d(begin, row_begin)
    doc = np.searchsorted(begin, cuts, side="right") - 1
    within = cuts - begin[doc]
    length = np.diff(cuts, append=total) - (within == 0)
    return np.searchsorted(cuts, row_begin), doc, np.maximum(within - 1, 0), length


def greedy_crop(lengths: np.ndarray, capacity: int) -> Pieces:
    """Documents in order; the one that reaches a row's end is cropped there and its rest thrown away."""
    end = np.cumsum(lengths + 1)
    ends, n = end.tolist(), len(lengths)
    rows, first, filled = [], 0, 0
    while first < n:
        rows.append(first)
        # A row with one token of room ends: the next document would be thrown away for its BOS.
        last = bisect_left(ends, filled + capacity - 1, first)
        filled = ends[min(last, n - 1)]
        first = last + 1
    row_first = np.array(rows, dtype=np.int64)
    cut = np.append(row_first[1:], n) - 1  # (R,) the last document of each row
    kept = lengths.copy()
    kept[cut] -= np.maximum(np.diff(end[cut], prepend=0) - capacity, 0)
    return row_first, np.arange(n), np.zeros(n, dtype=np.int64), kept


PACKERS: dict[str, Callable[[np.ndarray, int], Pieces]] = {
    packer.__name__: packer for packer in (concatenate, greedy_crop, best_fit_crop, best_fit_tail, best_fit_pad)
}
