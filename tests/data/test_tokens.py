"""Token shards: exact, 64-bit, whole or absent, and never read with another tokenizer."""

import errno
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data import shard as shards
from nanolearn.data import tokens
from nanolearn.data.shard import TokenShard
from nanolearn.data.sources import open_source
from nanolearn.data.tokens import TokenStore
from nanolearn.errors import Unreachable, UserError
from nanolearn.tokenizer import Tokenizer

BYTES = [bytes([i]) for i in range(256)]
TEXTS = {"train_0": ["one fish", "two", "réd fish"], "train_1": ["blue"], "val_0": ["held out"]}


@dataclass(frozen=True)
class Texts:
    """A source of given texts: one Parquet file a shard, in row groups of two documents."""

    folder: Path
    texts: dict[str, list[str | None]]
    name: str = "fake-0a1b"

    def shards(self, split: str) -> tuple[str, ...]:
        return tuple(name for name in self.texts if name.startswith(split))

    def size_hint(self, split: str) -> int:
        return sum(len(text.encode()) for name in self.shards(split) for text in self.texts[name] if text)

    def path(self, shard: str) -> Path:
        path = self.folder / f"{shard}.parquet"
        pq.write_table(pa.table({"text": pa.array(self.texts[shard], pa.string())}), path, row_group_size=2)
        return path


@pytest.fixture
def tokenizer():
    return Tokenizer([*BYTES, b"fi", b"sh"])


@pytest.fixture
def source(tmp_path):
    return Texts(tmp_path, TEXTS)


def documents(shard: TokenShard) -> list[list[int]]:
    return [shard.flat[a:b].tolist() for a, b in zip(shard.offsets, shard.offsets[1:], strict=False)]


def files(store: TokenStore) -> list[str]:
    """What lies in a store's folder besides locks and the tokenizer."""
    return sorted(path.name for path in store.folder.iterdir() if path.suffix != ".lock" and path.is_file())


def test_a_shard_holds_each_document_exactly_without_bos(source, tokenizer):
    store = TokenStore(source, tokenizer, "train")
    assert store.names == ("train_0", "train_1")
    shard = store.shard(0)
    assert documents(shard) == [tokenizer.encode_ordinary(text) for text in TEXTS["train_0"]]
    assert shard.n_documents == 3
    assert shard.lengths.dtype == shard.offsets.dtype == np.int64
    assert shard.lengths.sum() == len(shard.flat)
    assert shard.text_bytes == sum(len(text.encode()) for text in TEXTS["train_0"])


def test_a_shard_is_an_arrow_file_that_is_mapped_and_not_copied(source, tokenizer):
    shard = TokenStore(source, tokenizer, "train").shard(0)
    with pa.memory_map(str(shard.path)) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.schema.field("tokens").type == pa.large_list(pa.uint16())
        assert table.column("tokens").to_pylist() == documents(shard)
    assert table.schema.metadata[b"tokenizer"].decode() == tokenizer.digest
    assert table.schema.metadata[b"source"] == b"fake-0a1b"
    assert table.schema.metadata[b"shard"] == b"train_0"
    before = pa.total_allocated_bytes()
    again = TokenShard.open(shard.path, tokenizer.digest)
    assert pa.total_allocated_bytes() - before < 1024  # Arrow allocated nothing for the content
    assert not again.flat.flags.owndata


def test_more_than_65536_tokens_are_stored_in_32_bits(source):
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    large = Tokenizer([*BYTES, *pairs])
    shard = TokenStore(source, large, "train").shard(1)
    assert shard.flat.dtype == np.uint32
    assert documents(shard) == [large.encode_ordinary("blue")]
    assert shard.flat.max() > 1 << 14


def test_shards_are_tokenised_on_demand_and_once(source, tokenizer, monkeypatch):
    made = []
    real = tokens.tokenise
    monkeypatch.setattr(tokens, "tokenise", lambda *args: (made.append(args[1].name), real(*args)))
    TokenStore(source, tokenizer, "train").shard(1)
    assert made == ["train_1.arrow"]
    store = TokenStore(source, tokenizer, "train")
    assert not store.is_complete()
    store.prepare()
    store.prepare()
    assert made == ["train_1.arrow", "train_0.arrow"]
    assert store.is_complete()


def test_the_first_shards_only(source, tokenizer):
    assert TokenStore(source, tokenizer, "train", max_shards=1).names == ("train_0",)


def test_progress_counts_bytes_of_text_up_to_the_hint(source, tokenizer):
    TokenStore(source, tokenizer, "train").shard(1)  # what is there already counts as done
    told = []
    TokenStore(source, tokenizer, "train", progress=lambda done, total: told.append((done, total))).prepare()
    total = source.size_hint("train")
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (total, total)


def test_d1_a_corpus_with_one_shard_trains(tmp_path, tokenizer):
    """The source declares its split; one training shard is enough."""
    source = Texts(tmp_path, {"train_0": ["abc"], "val_0": ["x"]})
    assert TokenStore(source, tokenizer, "train").shard(0).n_documents == 1


def test_d7_missing_validation_shard_is_an_error(tmp_path, tokenizer):
    """No training shard becomes validation."""
    source = Texts(tmp_path, {"train_0": ["abc"], "train_1": ["abc"]})
    with pytest.raises(UserError, match="fake-0a1b has no val shard: no other shard may stand in for it"):
        TokenStore(source, tokenizer, "val")
    with pytest.raises(UserError, match="has no train shard"):
        TokenStore(Texts(tmp_path, {}), tokenizer, "train")


def _cut(share: float):
    return lambda data: data[: int(len(data) * share)]


DAMAGE = {
    "empty": lambda data: b"",
    "half": _cut(0.5),
    "all but a few bytes": _cut(0.995),
    "not Arrow": lambda data: b"x" * len(data),
    "another Arrow file": lambda data: _arrow_without_labels(),
}


def _arrow_without_labels() -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"tokens": pa.array([[1]], pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_found_out_and_made_again(kind, tmp_path, tokenizer):
    """A half or altered file never trains: it is named aloud and made again."""
    source = Texts(tmp_path, {"train_0": [f"document {i} of many fish" for i in range(60)]})
    path = TokenStore(source, tokenizer, "train").shard(0).path
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[kind](whole))
    said = []
    TokenStore(source, tokenizer, "train", say=said.append).shard(0)
    assert path.read_bytes() == whole
    assert len(said) == 1
    assert said[0].startswith(f"token file {path} is damaged")


def test_no_flipped_bit_gives_other_tokens_or_ends_the_process(source, tokenizer):
    """Bytes all over a small file, one by one: found out, or in a place that doesn't matter."""
    path = TokenStore(source, tokenizer, "train").shard(0).path
    whole = path.read_bytes()
    expected, refused = documents(TokenShard.open(path, tokenizer.digest)), 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        try:
            shard = TokenShard.open(path, tokenizer.digest).verify()
        except UserError:
            refused += 1
            continue
        assert shard.flat.dtype == np.uint16
        assert documents(shard) == expected
    assert refused > len(whole) // 9


def test_c5_tokens_of_another_tokenizer_are_refused(source, tokenizer):
    """Also where the folder's name would allow it, and the file stays as it is."""
    store = TokenStore(source, tokenizer, "train")
    path = store.shard(0).path
    other = Tokenizer([*BYTES, b"sh", b"fi"])
    with pytest.raises(UserError, match="was made with tokenizer .* not with"):
        TokenShard.open(path, other.digest)
    theirs = TokenStore(source, other, "train")
    theirs.folder.mkdir(parents=True)
    theirs.path(0).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="was made with tokenizer"):
        theirs.shard(0)
    assert theirs.path(0).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("texts", [[], [None, "", "  \n"]])
def test_a_shard_without_text_is_named(texts, tmp_path, tokenizer):
    source = Texts(tmp_path, {"train_0": texts, "train_1": ["abc"]})
    store = TokenStore(source, tokenizer, "train")
    with pytest.raises(UserError, match="shard train_0 of fake-0a1b holds no text: look at .*train_0.parquet"):
        store.shard(0)
    assert files(store) == []
    assert store.shard(1).n_documents == 1


def test_null_and_empty_documents_are_left_out_and_a_document_of_5_mb_is_kept(tmp_path, tokenizer):
    long = "no end in sight " * (5_000_000 // 16)
    source = Texts(tmp_path, {"train_0": ["a", None, "", long, " ", "b"]})
    shard = TokenStore(source, tokenizer, "train").shard(0)
    assert shard.n_documents == 3
    np.testing.assert_array_equal(shard.flat[1:-1], np.frombuffer(long.encode(), np.uint8))  # no merge applies


def test_a_failure_leaves_nothing_and_hurts_nothing(source, tokenizer, monkeypatch):
    store = TokenStore(source, tokenizer, "train")
    kept = store.shard(1).path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "write_arrow", full)
    with pytest.raises(UserError, match="the disk that holds .* is full"):
        store.shard(0)
    assert files(store) == ["train_1.arrow"]
    assert store.path(1).read_bytes() == kept
    monkeypatch.undo()


def test_what_a_killed_process_left_is_swept_up(source, tokenizer):
    store = TokenStore(source, tokenizer, "train")
    store.folder.mkdir(parents=True)
    (store.folder / "train_0.arrow.99.tmp").write_bytes(b"half")
    store.shard(0)
    assert not (store.folder / "train_0.arrow.99.tmp").exists()


def test_two_that_want_one_shard_make_it_once(source, tokenizer, monkeypatch):
    made, real, begun = [], tokens.tokenise, threading.Event()

    def slow(*args):
        made.append(args[1])
        begun.set()
        threading.Event().wait(0.2)
        real(*args)

    monkeypatch.setattr(tokens, "tokenise", slow)
    first = threading.Thread(target=lambda: TokenStore(source, tokenizer, "train").shard(0))
    first.start()
    begun.wait()
    assert documents(TokenStore(source, tokenizer, "train").shard(0))
    first.join()
    assert len(made) == 1


@pytest.mark.slow
def test_two_processes_that_want_one_shard_both_get_it(source, tokenizer, tmp_path):
    script = tmp_path / "make.py"
    tokenizer.save(tmp_path / "tokenizer")
    source.path("train_0")
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from nanolearn.data.tokens import TokenStore\nfrom nanolearn.tokenizer import Tokenizer\n"
        "here = Path(sys.argv[1])\n"
        "source = SimpleNamespace(name='fake-0a1b', shards=lambda split: ('train_0',), size_hint=lambda split: None,\n"
        "                         path=lambda shard: here / f'{shard}.parquet')\n"
        "shard = TokenStore(source, Tokenizer.load(here / 'tokenizer'), 'train').shard(0)\n"
        "print(shard.lengths.tolist())\n"
    )
    command = [sys.executable, str(script), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert answers[0] == answers[1] == [len(tokenizer.encode_ordinary(text)) for text in TEXTS["train_0"]]


def test_the_next_shards_are_made_ahead_by_other_processes(tmp_path, tokenizer, monkeypatch):
    source = Texts(tmp_path, {f"train_{number}": [f"fish {number}", "ring"] for number in range(5)})
    store = TokenStore(source, tokenizer, "train")
    order = [3, 1, 4, 0, 2]
    monkeypatch.setenv("LOCAL_RANK", "1")
    store.ahead(order)
    assert "team" not in vars(store), "one team a machine"
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):  # one core can spare one process at a time
        store.ahead(order)
        store.team.wait(60)
    assert files(store) == ["train_1.arrow", "train_4.arrow"], "two ahead, and not the present one"
    made = []
    monkeypatch.setattr(tokens, "tokenise", lambda *args: made.append(args))
    assert documents(store.shard(4)) == [tokenizer.encode_ordinary(text) for text in ("fish 4", "ring")]
    assert not made
    assert Tokenizer.load(store.folder / "tokenizer").digest == tokenizer.digest


def test_waiting_is_said_once_and_only_while_rows_are_read(source, tokenizer, monkeypatch):
    said = []
    TokenStore(source, tokenizer, "val", say=said.append).prepare()
    store = TokenStore(source, tokenizer, "train", say=said.append)
    assert said == []
    monkeypatch.setattr(store.team, "want", lambda indices: None)
    for index, order in enumerate([[0, 1], [1, 0]]):
        store.ahead(order)
        store.shard(index)
    assert said == ["waiting for shard train_0 to be fetched and tokenised"]


def test_counts_of_rows_outlive_the_shard_and_not_other_tokens(source, tokenizer):
    store = TokenStore(source, tokenizer, "train")
    assert store.rows(0, "a 9") is None
    store.keep_rows(0, "a 9", 7)
    store.keep_rows(0, "b 9", 8)
    again = TokenStore(source, tokenizer, "train")
    assert (again.rows(0, "a 9"), again.rows(0, "b 9"), again.rows(0, "c 9"), again.rows(1, "a 9")) == (
        7,
        8,
        None,
        None,
    )
    whole = store.path(0).read_bytes()
    store.path(0).unlink()
    assert again.rows(0, "a 9") == 7, "dropped for want of room"
    store.path(0).write_bytes(whole[: len(whole) // 2])
    assert again.rows(0, "a 9") is None
    store.path(0).write_bytes(store.shard(1).path.read_bytes())
    assert again.rows(0, "a 9") is None, "another shard's tokens"
    store.path(0).with_suffix(".rows.json").write_text("{")
    assert again.rows(0, "a 9") is None


def test_a_real_source(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Text number {i}. " * (i + 1), encoding="utf-8")
    source, tokenizer = open_source(str(folder)), Tokenizer(BYTES)
    shards = [TokenStore(source, tokenizer, split).shard(0) for split in ("train", "val")]
    assert sum(shard.n_documents for shard in shards) == 40
    assert sum(shard.text_bytes for shard in shards) == sum(len(f.read_bytes()) for f in folder.iterdir())


def test_a_server_that_is_gone_is_asked_again_while_training_waits(tmp_path, monkeypatch):
    said, pauses, source = [], [], Texts(tmp_path, TEXTS)
    path = source.path

    def gone(shard):
        if shard.startswith("train") and len(pauses) < 3:
            raise Unreachable("no answer", "look at the network")
        return path(shard)

    monkeypatch.setattr(type(source), "path", lambda _, shard: gone(shard))
    monkeypatch.setattr(tokens.time, "sleep", pauses.append)
    store = TokenStore(source, Tokenizer(BYTES), "train", patience=600.0, say=said.append)
    assert store.shard(0).n_documents == 3
    assert pauses == [60.0] * 3
    assert len([line for line in said if "tried again, for 10 minutes" in line]) == 3
    pauses.clear()
    hasty = TokenStore(source, Tokenizer([*BYTES, b"th"]), "train")
    with pytest.raises(Unreachable):
        hasty.shard(0)
    assert not pauses
