"""Token shards: exact, 64-bit, whole or absent, and never read with another tokenizer."""

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanolearn.data import tokens
from nanolearn.data.packing import pack
from nanolearn.data.sources import open_source
from nanolearn.data.tokens import DamagedShard, TokenShard, TokenStore
from nanolearn.errors import UserError
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


def test_d6_more_than_2_to_the_31_tokens_in_a_file_over_4_gib(tmp_path, tokenizer):
    """Arrow's own header and footer around a sparse body; what lies beyond 32 bits is read from there."""
    count = (1 << 31) + 5000
    offsets = np.array([0, 1 << 31, (1 << 31) + 4990, count])
    with open(tmp_path / "body", "wb") as body:
        body.truncate(2 * count)
    path = tmp_path / "sparse.arrow"
    sink = _SparseFile(path)
    labels = {"format": tokens.FORMAT, "tokenizer": tokenizer.digest, "text_bytes": "1", "checksum": "0"}
    body = np.memmap(tmp_path / "body", np.uint16, "r")
    tokens.write_arrow(pa.PythonFile(sink, "w"), body, offsets, labels)
    sink.close()
    with open(path, "r+b") as file:  # the last ten tokens, and two on the border of 2^31
        file.seek(sink.body_at + 2 * (count - 10))
        file.write(np.arange(1, 11, dtype=np.uint16).tobytes())
        file.seek(sink.body_at + 2 * ((1 << 31) - 1))
        file.write(np.array([7, 8], dtype=np.uint16).tobytes())

    shard = TokenShard.open(path, tokenizer.digest)
    assert path.stat().st_size > 1 << 32
    assert len(shard.flat) == int(shard.lengths.sum()) == count
    assert shard.flat[(1 << 31) - 1 : (1 << 31) + 1].tolist() == [7, 8]
    assert shard.flat[shard.offsets[2] : shard.offsets[3]].tolist() == list(range(1, 11))
    plan = pack(shard.lengths[2:], 6)
    begin = shard.offsets[2:][plan.doc] + plan.start
    assert [shard.flat[b : b + n].tolist() for b, n in zip(begin, plan.length, strict=True)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
    ]


class _SparseFile:
    """A file in which a large buffer of zeros becomes a hole: Arrow writes 4 GiB in milliseconds."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self.body_at = 0

    def write(self, data) -> int:
        size = memoryview(data).nbytes
        if size < 1 << 30:
            return self._file.write(data)
        self.body_at = self._file.tell()
        self._file.seek(size, os.SEEK_CUR)
        return size

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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


def test_damage_is_one_line_for_a_person(tmp_path, tokenizer):
    (tmp_path / "x.arrow").write_bytes(b"no")
    with pytest.raises(DamagedShard, match=r"x\.arrow is damaged \(.*\): its store makes it again"):
        TokenShard.open(tmp_path / "x.arrow", tokenizer.digest)
    with pytest.raises(UserError, match="there is no token file"):
        TokenShard.open(tmp_path / "y.arrow", tokenizer.digest)


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
    assert [path.suffix for path in store.folder.iterdir()] == [".lock"]
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

    monkeypatch.setattr(tokens, "write_arrow", full)
    with pytest.raises(UserError, match="the disk that holds .* is full"):
        store.shard(0)
    assert sorted(path.name for path in store.folder.iterdir() if path.suffix != ".lock") == ["train_1.arrow"]
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


def test_a_shard_is_made_ahead_by_another_process(source, tokenizer, monkeypatch):
    store = TokenStore(source, tokenizer, "train")
    monkeypatch.setenv("LOCAL_RANK", "1")
    store.ahead(0)
    assert store._helper is None  # one process a machine does it
    monkeypatch.setenv("LOCAL_RANK", "0")
    store.ahead(0)
    helper = store._helper
    store.ahead(1)
    assert store._helper is helper or not helper.is_alive()  # never two at a time
    helper.join(60)
    assert store.path(0).exists()
    made = []
    monkeypatch.setattr(tokens, "tokenise", lambda *args: made.append(args))
    assert documents(store.shard(0)) == [tokenizer.encode_ordinary(text) for text in TEXTS["train_0"]]
    assert not made


def test_a_real_source(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Text number {i}. " * (i + 1), encoding="utf-8")
    source, tokenizer = open_source(str(folder)), Tokenizer(BYTES)
    shards = [TokenStore(source, tokenizer, split).shard(0) for split in ("train", "val")]
    assert sum(shard.n_documents for shard in shards) == 40
    assert sum(shard.text_bytes for shard in shards) == sum(len(f.read_bytes()) for f in folder.iterdir())
