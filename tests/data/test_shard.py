"""The token file: 64-bit, memory-mapped, and damage is one line."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nanolearn.data.packing import pack
from nanolearn.data.shard import FORMAT, DamagedShard, TokenShard, read_labels, write_arrow
from nanolearn.errors import UserError
from nanolearn.tokenizer import Tokenizer


@pytest.fixture
def tokenizer():
    return Tokenizer([bytes([i]) for i in range(256)])


def test_d6_more_than_2_to_the_31_tokens_in_a_file_over_4_gib(tmp_path, tokenizer):
    """Arrow's own header and footer around a sparse body; what lies beyond 32 bits is read from there."""
    count = (1 << 31) + 5000
    offsets = np.array([0, 1 << 31, (1 << 31) + 4990, count])
    with open(tmp_path / "body", "wb") as body:
        body.truncate(2 * count)
    path = tmp_path / "sparse.arrow"
    sink = _SparseFile(path)
    labels = {"format": FORMAT, "tokenizer": tokenizer.digest, "text_bytes": "1", "checksum": "0"}
    body = np.memmap(tmp_path / "body", np.uint16, "r")
    write_arrow(pa.PythonFile(sink, "w"), body, offsets, labels)
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


def test_damage_is_one_line_for_a_person(tmp_path, tokenizer):
    (tmp_path / "x.arrow").write_bytes(b"no")
    with pytest.raises(DamagedShard, match=r"x\.arrow is damaged \(.*\): its store makes it again"):
        TokenShard.open(tmp_path / "x.arrow", tokenizer.digest)
    with pytest.raises(UserError, match="there is no token file"):
        TokenShard.open(tmp_path / "y.arrow", tokenizer.digest)
    with pytest.raises(DamagedShard, match="its store makes it again"):
        read_labels(tmp_path / "x.arrow")
