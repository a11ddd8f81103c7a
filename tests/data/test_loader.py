"""One global order of rows: the same for every number of ranks, micro-batch and restart, without end."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.data.loader import IGNORED, FixedRows, Loader, RowOrder, assemble, ranges, rules
from nanolearn.data.packing import PACKERS, pack
from nanolearn.data.shard import TokenShard
from nanolearn.data.sources import open_source
from nanolearn.data.tokens import TokenStore
from nanolearn.errors import UserError
from nanolearn.tokenizer import Tokenizer, train

BOS = 60_000


class Shards:
    """A store in memory. Token values count up over all shards, so that every token can be told from every other."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.asked: list[int] = []
        self.wanted_next: list[list[int]] = []
        self.said: list[str] = []
        self.counted: dict[tuple[int, str], int] = {}
        self.say = self.said.append
        self._shards, first = [], 0
        for of_shard in lengths:
            offsets = np.cumsum([0, *of_shard])
            flat = np.arange(first, first + offsets[-1]).astype(np.uint16)
            self._shards.append(TokenShard(Path(), flat, offsets, 0, 0))
            first += int(offsets[-1])
        self.n_tokens = first
        self.n_shards = len(lengths)
        self.complete = True

    def shard(self, index: int) -> TokenShard:
        self.asked.append(index)
        return self._shards[index]

    def is_complete(self) -> bool:
        return self.complete

    def ahead(self, order: list[int]) -> None:
        self.wanted_next.append(order)

    def rows(self, index: int, packer: str) -> int | None:
        return self.counted.get((index, packer))

    def keep_rows(self, index: int, packer: str, rows: int) -> None:
        self.counted[index, packer] = rows


def random_shards(count: int = 4, documents: int = 30, seed: int = 0, longest: int = 60) -> Shards:
    random = np.random.default_rng(seed)
    return Shards([random.integers(1, longest, documents).tolist() for _ in range(count)])


def take(loader: Loader, first_row: int, rows_per_step: int, micro_batch: int, steps: int) -> list:
    """The micro-batches of some steps, as (row, inputs, targets, epoch)."""
    count = steps * rows_per_step // (micro_batch * loader.world)
    batches = loader.micro_batches(first_row, rows_per_step, micro_batch)
    return [(b.row, b.inputs.numpy(), b.targets.numpy(), b.epoch) for b, _ in zip(batches, range(count), strict=False)]


def global_rows(store, first_row: int, rows_per_step: int, micro_batch: int, steps: int, world: int, **options):
    """The rows that all ranks together see, put in the order of their global numbers."""
    seen = {}
    for rank in range(world):
        loader = Loader(store, BOS, 16, options.get("packer", "best_fit_tail"), options.get("seed", 0), rank, world)
        for row, inputs, targets, _ in take(loader, first_row, rows_per_step, micro_batch, steps):
            for j in range(micro_batch):
                assert row + j not in seen  # no row for two ranks
                seen[row + j] = (inputs[j].tolist(), targets[j].tolist())
    assert sorted(seen) == list(range(first_row, first_row + steps * rows_per_step))  # and none is left out
    return [seen[row] for row in sorted(seen)]


def content(inputs, targets) -> list[int]:
    """The tokens of text that rows hold as targets (each piece's tokens are targets once)."""
    kept = np.asarray(targets)[(np.asarray(targets) != IGNORED) & (np.asarray(targets) != BOS)]
    return kept.tolist()


def test_ranges_equals_the_naive_one():
    start, length = np.array([7, 0, 3]), np.array([2, 0, 3])
    assert ranges(start, length).tolist() == [7, 8, 3, 4, 5]
    assert ranges(start[:0], length[:0]).tolist() == []


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(2, 12),
    st.sampled_from(sorted(PACKERS)),
    st.randoms(use_true_random=False),
)
def test_assembled_rows_equal_the_naive_ones(lengths, capacity, packer, random):
    shard = Shards([lengths]).shard(0)
    plan = pack(shard.lengths, capacity, packer)
    rows = [random.randrange(plan.n_rows) for _ in range(5)]
    tokens, real = assemble(shard, plan, np.array(rows), BOS)
    for i, row in enumerate(rows):
        naive = []
        for piece in range(plan.row_start[row], plan.row_start[row + 1]):
            begin = shard.offsets[plan.doc[piece]] + plan.start[piece]
            naive += [BOS, *shard.flat[begin : begin + plan.length[piece]].tolist()]
        assert real[i] == len(naive)
        assert tokens[i].tolist() == naive + [BOS] * (capacity - len(naive))


def test_targets_are_inputs_one_ahead_and_padding_is_ignored():
    store = Shards([[3, 5]])
    _, inputs, targets, _ = take(Loader(store, BOS, 16, "best_fit_tail", 0), 0, 1, 1, 1)[0]
    assert inputs.tolist() == [[BOS, 3, 4, 5, 6, 7, BOS, 0, 1, 2, *[BOS] * 6]]
    assert targets.tolist() == [[3, 4, 5, 6, 7, BOS, 0, 1, 2, *[IGNORED] * 7]]
    batch = next(Loader(store, BOS, 16, "best_fit_tail", 0).micro_batches(0, 1, 1))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()


def test_an_epoch_holds_every_token_as_a_target_once():
    store = random_shards()
    order = RowOrder(store, 16, "best_fit_tail", seed=3)
    rows = order.rows_in_epoch()
    for first in (0, rows):  # the second epoch too
        held = [t for _, t in global_rows_of(store, first, rows, seed=3)]
        assert sorted(sum((content(None, t) for t in held), [])) == list(range(store.n_tokens))


def global_rows_of(store, first: int, count: int, seed: int):
    return global_rows(store, first, count, 1, 1, 1, seed=seed)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_d5_all_ranks_together_see_exactly_the_global_rows(world, micro_batch):
    """Shard ends lie inside the steps, and no rank gets more, fewer or other rows than its share."""
    rows_per_step, steps = 480, 2  # 960 rows; a shard has about 60, an epoch about 240
    store = random_shards()
    expected = global_rows(store, 7, rows_per_step, 1, steps, 1)
    assert global_rows(store, 7, rows_per_step, micro_batch, steps, world) == expected


def test_d2_sixteen_ranks_and_ten_documents():
    """Less text than ranks; every rank gets rows, from further epochs."""
    store = Shards([[5] * 6, [5] * 4])
    rows = global_rows(store, 0, 32, 1, 2, 16)
    assert len(rows) == 64
    assert all(content(*row) for row in rows)


def test_rows_do_not_depend_on_the_division_of_a_step():
    store = random_shards(count=2)
    divisions = [(16, 1), (8, 2), (4, 4), (1, 16)]  # rows of a micro-batch, ranks: 1x16, 2x8 and so on
    seen = [global_rows(store, 0, 16, micro_batch, 5, world) for micro_batch, world in divisions]
    assert all(rows == seen[0] for rows in seen)


def test_d3_after_the_last_row_the_next_epoch_begins_reshuffled():
    """No hang and no short batch at the end of the data; the pass is counted."""
    store = random_shards(count=3, documents=8)
    order = RowOrder(store, 16, "best_fit_tail", seed=0)
    per_epoch = order.rows_in_epoch()
    places = [order.locate(row) for row in range(3 * per_epoch)]
    for epoch in range(3):
        of_epoch = places[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert {place.epoch for place in of_epoch} == {epoch}
        assert len({(place.shard, place.row) for place in of_epoch}) == per_epoch
    first, second = ([(p.shard, p.row) for p in places[i * per_epoch : (i + 1) * per_epoch]] for i in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    loader = Loader(store, BOS, 16, "best_fit_tail", 0)
    epochs = [epoch for _, _, _, epoch in take(loader, 0, 4, 4, per_epoch)]
    assert epochs == [places[0].epoch] * -(-per_epoch // 4) + epochs[-(-per_epoch // 4) :]
    assert max(epochs) == 3
    assert {inputs.shape for _, inputs, _, _ in take(loader, 0, 4, 4, per_epoch)} == {(4, 16)}


def test_d3_one_row_in_the_whole_corpus_is_repeated_for_ever():
    """A batch larger than the corpus spans several epochs."""
    rows = global_rows(Shards([[5]]), 0, 8, 4, 2, 2)
    assert len({str(row) for row in rows}) == 1


def test_d4_a_resumed_run_goes_on_with_the_very_next_row():
    """The cursor is one number, also with another division into ranks and micro-batches."""
    whole = global_rows(random_shards(), 0, 24, 4, 10, 1)
    for done in (1, 4, 9):
        resumed = global_rows(random_shards(), 24 * done, 24, 2, 10 - done, 3)
        assert resumed == whole[24 * done :]


def test_the_order_depends_on_seed_epoch_and_shard_and_on_nothing_that_happened_before():
    def places(seed: int, rows) -> list:
        order = RowOrder(random_shards(), 16, "best_fit_tail", seed)
        return [order.locate(row) for row in rows]

    rows = list(range(300))
    assert places(0, rows) == places(0, rows)
    assert places(0, rows[::-1]) == places(0, rows)[::-1]
    assert places(0, rows) != places(1, rows)
    visits = [(place.epoch, place.shard) for place in places(0, rows)]
    changes = [b for a, b in zip([None, *visits], visits, strict=False) if a != b]
    assert len(changes) == len(set(changes))  # a shard is finished before the next one begins
    assert {shard for _, shard in changes} == {0, 1, 2, 3}


def test_neighbouring_rows_come_from_different_documents():
    """Rows are permuted after packing: a document of many rows doesn't fill a step."""
    store = Shards([[1600, *[10] * 160]])
    order = RowOrder(store, 16, "best_fit_tail", seed=0)
    rows = [order.locate(row).row for row in range(100)]
    assert sum(row < 100 for row in rows) < 70  # the first 100 rows of the plan are the long document's


def test_only_the_shards_on_the_way_are_read_and_the_next_is_announced():
    store = random_shards(count=50)
    loader = Loader(store, BOS, 16, "best_fit_tail", 0)
    next(loader.micro_batches(0, 4, 4))
    assert len(set(store.asked)) == 1
    order = loader.order
    assert store.wanted_next[-1][:2] == [order.visit(0)[1], order.visit(1)[1]]
    assert order.visit(50)[0] == 1
    store.complete = False
    with pytest.raises(ValueError, match="once every shard has been tokenised"):
        order.rows_in_epoch()


def test_all_shards_are_announced_in_the_order_of_their_next_use():
    store = random_shards(count=5)
    order = RowOrder(store, 16, "best_fit_tail", seed=3)
    visits = [order.visit(number)[1] for number in range(15)]
    for number in range(8):
        assert order.coming(number) is order.coming(number)
        assert order.coming(number) == list(dict.fromkeys(visits[number:]))[:5]
    for row in range(0, 200, 4):
        order.read(row, 4, BOS)
        assert store.wanted_next[-1][0] == order.locate(row + 3).shard == store.asked[-1]


def test_a_shard_is_announced_before_it_is_waited_for():
    """So that its successors are made meanwhile."""
    store = random_shards(count=3)
    told = []
    store.ahead = lambda order: told.append((order[0], order[0] in store.asked))
    RowOrder(store, 16, "best_fit_tail", seed=0).read(0, 1, BOS)
    assert told[0] == (told[0][0], False)


@pytest.mark.parametrize("packer", PACKERS)
def test_d4_a_deep_resume_reads_no_earlier_shard_and_finds_the_same_rows(packer):
    store = random_shards(count=12)
    order = RowOrder(store, 16, packer, seed=1)
    rows = order.rows_in_epoch()
    everything = order.read(0, 3 * rows, BOS)[0]
    for first in (rows // 2, rows - 1, rows, 2 * rows + rows // 3):
        fresh = Shards([[1]])
        fresh.__dict__.update(store.__dict__, asked=[], said=[], wanted_next=[])
        fresh.say = fresh.said.append
        resumed = RowOrder(fresh, 16, packer, seed=1)
        np.testing.assert_array_equal(resumed.read(first, 1, BOS)[0], everything[first : first + 1])
        assert set(fresh.asked) == {order.locate(first).shard}
        assert fresh.said == []


def test_a_deep_resume_without_counts_reads_what_lies_before_and_says_so():
    store = random_shards(count=12)
    row = RowOrder(store, 16, "best_fit_tail", seed=1).rows_in_epoch() // 2
    store.counted.clear()
    store.asked.clear()
    order = RowOrder(store, 16, "best_fit_tail", seed=1)
    order.read(row, 1, BOS)
    assert len(set(store.asked)) == order.locate(row).epoch * 12 + len(order._visits)
    assert store.said == [f"row {row:,} lies behind shards whose rows are not counted yet: they are read first"]


def test_a_count_on_record_that_is_not_true_is_refused_before_it_moves_a_row():
    store = random_shards(count=3)
    RowOrder(store, 16, "best_fit_tail", seed=0).rows_in_epoch()
    store.counted = {key: rows + 1 for key, rows in store.counted.items()}
    with pytest.raises(UserError, match=r"shard \d holds \d+ rows, and \d+ were on record"):
        RowOrder(store, 16, "best_fit_tail", seed=0).read(0, 1, BOS)


def test_counts_name_the_packer_its_row_and_what_it_does(monkeypatch):
    names = {rules(packer, capacity) for packer in PACKERS for capacity in (9, 33, 2049)}
    assert len(names) == 3 * len(PACKERS)
    before = rules("best_fit_tail", 33)
    monkeypatch.setitem(PACKERS, "best_fit_tail", PACKERS["concatenate"])  # a later version packs otherwise
    assert rules("best_fit_tail", 33) != before


def test_rows_that_cannot_be_divided_are_refused_before_anything_is_read():
    loader = Loader(random_shards(), BOS, 16, "best_fit_tail", 0, rank=0, world=3)
    with pytest.raises(UserError, match="16 rows a step can't be divided over 3 ranks of 2 rows"):
        loader.micro_batches(0, 16, 2)
    with pytest.raises(UserError, match="choose a micro_batch that divides"):
        loader.micro_batches(0, 16, 0)


def fixed(rows: FixedRows, micro_batch: int, max_rows: int | None = None, world: int = 1) -> list:
    """Rows of all ranks by number, without the filling."""
    seen = {}
    for rank in range(world):
        for batch in rows.batches(micro_batch, max_rows, rank, world):
            assert batch.inputs.shape == batch.targets.shape == (micro_batch, rows.sequence_len)
            real = [j for j in range(micro_batch) if (batch.targets[j] != IGNORED).any()]
            assert real == list(range(len(real)))
            assert real  # no batch of ignored targets alone
            assert batch.row not in seen
            seen[batch.row] = [(batch.inputs[j].tolist(), batch.targets[j].tolist()) for j in real]
    return [row for number in sorted(seen) for row in seen[number]]


def test_validation_holds_every_token_as_a_target_once():
    store = random_shards(count=3, seed=5)
    rows = FixedRows(store, BOS, 16)
    held = fixed(rows, 7)
    assert len(held) == rows.n_rows
    assert sorted(sum((content(*row) for row in held), [])) == list(range(store.n_tokens))


@pytest.mark.parametrize("max_rows", [None, 1, 17, 10_000])
def test_validation_is_the_same_for_every_micro_batch_and_world(max_rows):
    """Promise 8 of the design."""
    rows = FixedRows(random_shards(count=3, seed=5), BOS, 16)
    expected = fixed(rows, 1, max_rows)
    assert len(expected) == min(max_rows or rows.n_rows, rows.n_rows)
    for micro_batch, world in ((3, 1), (64, 1), (2, 4), (5, 16)):
        assert fixed(rows, micro_batch, max_rows, world) == expected


def test_a_part_of_validation_is_spread_over_the_split():
    rows = FixedRows(random_shards(count=4, seed=5), BOS, 16)
    part = [batch.row for batch in rows.batches(1, max_rows=8)]
    assert part == [i * rows.n_rows // 8 for i in range(8)]


def test_e3_fewer_validation_rows_than_one_batch():
    """One batch, its missing rows filled with ignored targets."""
    batches = list(FixedRows(Shards([[5]]), BOS, 16).batches(micro_batch=8))
    assert len(batches) == 1
    assert batches[0].inputs.shape == (8, 16)
    assert batches[0].targets[0, :6].tolist() == [0, 1, 2, 3, 4, IGNORED]
    assert (batches[0].targets[1:] == IGNORED).all()
    assert (batches[0].inputs[1:] == BOS).all()


def test_d6_rows_are_read_from_beyond_2_to_the_31():
    """A shard of 2^31 tokens and more, as a view that costs no memory."""
    count = (1 << 31) + 100
    flat = np.lib.stride_tricks.as_strided(np.array([9], np.uint16), (count,), (0,), writeable=False)
    shard = TokenShard(Path(), flat, np.array([0, 1 << 31, count]), 0, 0)
    plan = pack(shard.lengths, (1 << 16) + 1)
    tokens, real = assemble(shard, plan, np.array([0, plan.n_rows - 2, plan.n_rows - 1]), BOS)
    assert real.tolist() == [(1 << 16) + 1, (1 << 16) + 1, 101]
    assert tokens[2, :102].tolist() == [BOS, *[9] * 100, BOS]


def test_with_a_real_source_tokenizer_and_store(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(
            f"Letter {i}: " + "the cat sat on the mat. " * (i % 7 + 1), encoding="utf-8"
        )
    source = open_source(str(folder))
    paths = [source.path(name) for name in source.shards("train")]
    texts = [text for path in paths for text in pq.read_table(path).column("text").to_pylist()]
    tokenizer = train(texts, 300)
    store = TokenStore(source, tokenizer, "train")
    store.prepare()
    rows = Loader(store, tokenizer.bos, 32, "best_fit_tail", 0).order.rows_in_epoch()
    first = next(Loader(store, tokenizer.bos, 32, "concatenate", 0).micro_batches(0, 4, 4))
    assert first.inputs[:, 0].tolist() == [tokenizer.bos] * 4
    held = FixedRows(store, tokenizer.bos, 32)
    assert held.n_rows == rows
    size = sum(
        int(tokenizer.token_bytes()[batch.targets[batch.targets != IGNORED].numpy()].sum()) for batch in held.batches(8)
    )
    assert size == sum(len(text.encode()) for text in texts)


def test_a_store_that_meets_an_empty_shard_says_so_in_the_consumer(tmp_path):
    class Source:
        name = "empty-0a1b"

        def shards(self, split):
            return ("train_0",)

        def size_hint(self, split):
            return None

        def path(self, shard):
            pq.write_table(pa.table({"text": pa.array([None], pa.string())}), tmp_path / "x.parquet")
            return tmp_path / "x.parquet"

    store = TokenStore(Source(), Tokenizer([bytes([i]) for i in range(256)]), "train")
    with pytest.raises(UserError, match="shard train_0 of empty-0a1b holds no text"):
        next(Loader(store, 256, 16, "best_fit_tail", 0).micro_batches(0, 1, 1))
