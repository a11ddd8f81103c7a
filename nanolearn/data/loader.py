"""One global order of rows, and from it the batches of one rank: the cursor of a run is one integer.

Row k of a run is a function of (corpus, tokenizer, packer, row length, seed) and of nothing else: not of the
number of ranks, the micro-batch, or the restarts. Every rank knows the whole order and takes its own rows
from it. So no rank can drift from another, none runs dry before the others, and a resumed run goes on with
the very next row.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from nanolearn import rng
from nanolearn.data.batch import Batch
from nanolearn.data.packing import Plan, pack
from nanolearn.data.shard import TokenShard
from nanolearn.data.tokens import TokenStore
from nanolearn.errors import UserError

IGNORED = -1  # a target that counts in no loss
KEPT_PLANS = 4  # in memory; a shard of 61 M tokens has a plan of about 3 MB and 0.2 s


class Place(NamedTuple):
    """Where a global row lies: pass over the corpus, shard, row in that shard's plan."""

    epoch: int
    shard: int
    row: int


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ..., for length[0] numbers, then the same from start[1], and so on: int64.

    >>> ranges(np.array([5, 0]), np.array([3, 2])).tolist()
    [5, 6, 7, 0, 1]

    Taught in chapter 02_packing.
    """
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(int(length.sum()))


def assemble(shard: TokenShard, plan: Plan, rows: np.ndarray, bos: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of some rows of a plan, int64 (rows, T + 1), and how many of each row are real, int64 (rows,).

    Each piece becomes BOS and its slice; what is not real (padding) is BOS too, and must be ignored as a
    target. All rows are gathered at once, without a loop: about 10 ns a token.

    >>> from pathlib import Path
    >>> shard = TokenShard(Path("a"), np.array([5, 6, 7]), np.array([0, 2, 3]), text_bytes=9, checksum=0)
    >>> tokens, real = assemble(shard, pack(shard.lengths, 4), np.array([0, 1]), bos=9)
    >>> tokens.tolist(), real.tolist()
    ([[9, 5, 6, 9], [9, 7, 9, 9]], [4, 2])

    Taught in chapter 02_packing.
    """
    first, pieces_per_row = plan.row_start[rows], plan.row_start[rows + 1] - plan.row_start[rows]
    piece = ranges(first, pieces_per_row)  # (P,)
    length = plan.length[piece]
    begin = np.cumsum(length + 1) - (length + 1)  # (P,) if all rows lay back to back
    row_first = np.cumsum(pieces_per_row) - pieces_per_row  # (R,)
    real = np.add.reduceat(length + 1, row_first)  # (R,)
    # Rows are `capacity` apart, so what earlier rows lack is added to a piece's place.
    shift = np.arange(len(rows)) * plan.capacity - begin[row_first]
    place = begin + np.repeat(shift, pieces_per_row)
    tokens = np.full((len(rows), plan.capacity), bos, dtype=np.int64)  # (R, T + 1)
    source = ranges(shard.offsets[plan.doc[piece]] + plan.start[piece], length)
    tokens.reshape(-1)[ranges(place + 1, length)] = shard.flat[source]
    return tokens, real


def to_batch(tokens: np.ndarray, real: np.ndarray, row: int, epoch: int) -> Batch:
    """Rows of T + 1 tokens (B, T + 1) as a batch: inputs and the targets one token ahead, padding ignored.

    >>> batch = to_batch(np.array([[9, 1, 2, 9]]), real=np.array([3]), row=0, epoch=0)
    >>> batch.inputs.tolist(), batch.targets.tolist()
    ([[9, 1, 2]], [[1, 2, -1]])

    Taught in chapter 02_packing.
    """
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    targets[np.arange(targets.shape[1]) >= real[:, None] - 1] = IGNORED
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), row, epoch)


def rules(packer: str, capacity: int) -> str:
    """Names a packer, its row and what it does: a version that packs otherwise must not trust earlier counts.

    >>> rules("best_fit_tail", 2049).split()[:2], rules("best_fit_tail", 2049) == rules("best_fit_crop", 2049)
    (['best_fit_tail', '2049'], False)

    Taught in chapter 02_packing.
    """
    plan = pack(np.arange(1, 400) * 7919 % (3 * capacity) + 1, capacity, packer)
    parts = [part.tobytes() for part in (plan.row_start, plan.doc, plan.start, plan.length)]
    return f"{packer} {capacity} {hashlib.blake2b(b''.join(parts), digest_size=8).hexdigest()}"


class _Plans:
    """The plans of a store's shards, computed when asked for; the latest few are kept, and the rows of all counted."""

    def __init__(self, store: TokenStore, sequence_len: int, packer: str) -> None:
        self.store, self.capacity, self.packer = store, sequence_len + 1, packer
        self.rules = rules(packer, self.capacity)
        self.plan = lru_cache(maxsize=KEPT_PLANS)(self._pack)
        self._rows: dict[int, int] = {}

    def _pack(self, shard: int) -> Plan:
        plan = pack(self.store.shard(shard).lengths, self.capacity, self.packer)
        if self._rows.setdefault(shard, plan.n_rows) != plan.n_rows:
            happened = f"shard {shard} holds {plan.n_rows:,} rows, and {self._rows[shard]:,} were on record"
            raise UserError(happened, "its text or its tokens are not those of before: run `nanolearn data verify`")
        self.store.keep_rows(shard, self.rules, plan.n_rows)
        return plan

    def known(self, shard: int) -> bool:
        """Whether a shard's rows are counted; looks on record, and reads no token."""
        if shard not in self._rows and (counted := self.store.rows(shard, self.rules)) is not None:
            self._rows[shard] = counted
        return shard in self._rows

    def rows(self, shard: int) -> int:
        """Rows in a shard's plan."""
        return self._rows[shard] if self.known(shard) else self.plan(shard).n_rows

    def assemble(self, shard: int, rows: np.ndarray, bos: int) -> tuple[np.ndarray, np.ndarray]:
        """Some rows of a shard: tokens (rows, T + 1) and how many of each are real (rows,)."""
        return assemble(self.store.shard(shard), self.plan(shard), rows, bos)


class RowOrder:
    """The endless order of a run's training rows: row k -> (epoch, shard, row of that shard's plan).

    An epoch visits the shards in a permutation that depends on (seed, epoch), and each shard's rows in one
    that depends on (seed, epoch, shard). Rows are permuted after packing, so that a long document doesn't
    fill neighbouring rows. A run that is resumed at row k counts rows up to there: those of shards that were
    packed before are on record beside their tokens; the others are tokenised and packed, 0.2 s each.

    Taught in chapter 02_packing.
    """

    def __init__(self, store: TokenStore, sequence_len: int, packer: str, seed: int) -> None:
        self.store, self.seed = store, seed
        self.plans = _Plans(store, sequence_len, packer)
        self._begins: list[int] = []  # the first row of each visit to a shard
        self._visits: list[tuple[int, int]] = []  # (epoch, shard)
        self._end = 0
        self._said_uncounted = False
        self._now, self._coming = -1, list[int]()  # a visit, and the shards from there on, in order
        self._permutation = lru_cache(maxsize=KEPT_PLANS)(self._permute)
        self._shards = lru_cache(maxsize=KEPT_PLANS)(self._permute_shards)

    def _permute_shards(self, epoch: int) -> np.ndarray:
        return rng.stream(self.seed, "shards", epoch).permutation(self.store.n_shards)

    def _permute(self, epoch: int, shard: int) -> np.ndarray:
        return rng.stream(self.seed, "rows", epoch, shard).permutation(self.plans.rows(shard))

    def visit(self, number: int) -> tuple[int, int]:
        """The epoch and the shard of the n-th visit to a shard; tokenises nothing."""
        epoch, place = divmod(number, self.store.n_shards)
        return epoch, int(self._shards(epoch)[place])

    def _find(self, row: int) -> int:
        """The number of the visit that holds a row."""
        while row >= self._end:
            epoch, shard = self.visit(len(self._visits))
            if not (counted := self.plans.known(shard)):
                self.store.ahead(self.coming(len(self._visits)))
            self._begins.append(self._end)
            self._visits.append((epoch, shard))
            self._end += self.plans.rows(shard)
            if row >= self._end and not counted and not self._said_uncounted:
                self._said_uncounted = True
                self.store.say(f"row {row:,} lies behind shards whose rows are not counted yet: they are read first")
        return bisect_right(self._begins, row) - 1

    def coming(self, number: int) -> list[int]:
        """All shards, in the order in which rows need them from the n-th visit on; the same list while that lasts."""
        if number != self._now:
            epoch, place = divmod(number, self.store.n_shards)
            visits = np.concatenate([self._shards(epoch)[place:], self._shards(epoch + 1)])
            self._now, self._coming = number, list(dict.fromkeys(visits.tolist()))
        return self._coming

    def locate(self, row: int) -> Place:
        """Where one row lies."""
        number = self._find(row)
        epoch, shard = self._visits[number]
        return Place(epoch, shard, int(self._permutation(epoch, shard)[row - self._begins[number]]))

    def read(self, first: int, count: int, bos: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows first .. first + count - 1: tokens int64 (count, T + 1), real tokens int64 (count,)."""
        parts, end = [], first + count
        while first < end:
            number = self._find(first)
            epoch, shard = self._visits[number]
            start, size = first - self._begins[number], self.plans.rows(shard)
            # Training meets the next shards soon: they may be made while this one is read, or waited for.
            self.store.ahead(self.coming(number))
            rows = self._permutation(epoch, shard)[start : start + min(end - first, size - start)]
            parts.append(self.plans.assemble(shard, rows, bos))
            first += len(rows)
        return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([real for _, real in parts])

    def rows_in_epoch(self) -> int:
        """Rows of one pass; ValueError unless every shard has been tokenised, for it reads them all."""
        if not self.store.is_complete():
            raise ValueError("rows of an epoch are known once every shard has been tokenised")
        return sum(self.plans.rows(shard) for shard in range(self.store.n_shards))


class Loader:
    """The training batches of one rank: `bos` is the id that begins every piece; `rank` of `world` ranks.

    Taught in chapter 02_packing.
    """

    def __init__(
        self, store: TokenStore, bos: int, sequence_len: int, packer: str, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.order = RowOrder(store, sequence_len, packer, seed)
        self.bos, self.rank, self.world = bos, rank, world

    def micro_batches(self, first_row: int, rows_per_step: int, micro_batch: int) -> Iterator[Batch]:
        """This rank's micro-batches from global row `first_row` on, without end: (micro_batch, T) each.

        In step s, micro-step a and rank r read row first_row + s * rows_per_step + (a * world + r) *
        micro_batch + j. Raises UserError if rows_per_step is no multiple of micro_batch * world.
        """
        stride = micro_batch * self.world
        if micro_batch < 1 or rows_per_step < 1 or rows_per_step % stride:
            happened = f"{rows_per_step} rows a step can't be divided over {self.world} ranks of {micro_batch} rows"
            raise UserError(happened, "choose a micro_batch that divides rows per step and rank")
        return self._from(first_row + self.rank * micro_batch, stride, micro_batch)

    def _from(self, row: int, stride: int, micro_batch: int) -> Iterator[Batch]:
        # A step is a whole number of strides, so its borders need no counting here.
        while True:
            tokens, real = self.order.read(row, micro_batch, self.bos)
            yield to_batch(tokens, real, row, self.order.locate(row).epoch)
            row += stride


class FixedRows:
    """The rows of a validation split: every token of it once, in one order that never changes.

    Packed with `best_fit_tail`, which loses nothing; no permutation, no seed, no epochs.

    Taught in chapter 10_evaluation.
    """

    def __init__(self, store: TokenStore, bos: int, sequence_len: int) -> None:
        self.store, self.bos, self.sequence_len = store, bos, sequence_len
        self._plans = _Plans(store, sequence_len, "best_fit_tail")
        self._begins = np.cumsum([0] + [self._plans.rows(shard) for shard in range(store.n_shards)])

    @property
    def n_rows(self) -> int:
        """Rows in the split."""
        return int(self._begins[-1])

    def batches(self, micro_batch: int, max_rows: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """This rank's share of the rows, (micro_batch, T) each; the last one is filled with ignored targets.

        `max_rows` takes that many rows, evenly spaced over the split. The rows are the same for any
        micro_batch and world. No batch is made of ignored targets alone, so with few rows a rank may get
        fewer batches than another, or none: sum first, reduce once.
        """
        count = self.n_rows if max_rows is None else min(max_rows, self.n_rows)
        chosen = np.arange(count) * self.n_rows // max(count, 1)
        for first in range(rank * micro_batch, count, micro_batch * world):
            tokens, real = self._read(chosen[first : first + micro_batch])
            missing = micro_batch - len(tokens)
            tokens = np.pad(tokens, ((0, missing), (0, 0)), constant_values=self.bos)
            yield to_batch(tokens, np.pad(real, (0, missing)), int(chosen[first]), epoch=0)

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shard_of = np.searchsorted(self._begins, rows, side="right") - 1
        parts = [
            self._plans.assemble(shard, rows[shard_of == shard] - self._begins[shard], self.bos)
            for shard in np.unique(shard_of).tolist()
        ]
        return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([real for _, real in parts])
