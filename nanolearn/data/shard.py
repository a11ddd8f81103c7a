"""The file that holds a shard's tokens: made once from its text, whole or not at all, memory-mapped by whoever reads.

Documents lie back to back without BOS; the loader adds it. A file names the tokenizer it was made with and
carries a checksum: tokens of another tokenizer, or of half a file, would train without any error. All positions
are 64-bit: 2^31 tokens are an ordinary shard of a large corpus.
"""

import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from nanolearn.data.sources import read_texts
from nanolearn.errors import UserError
from nanolearn.fetch import replacing
from nanolearn.tokenizer import Tokenizer

FORMAT = "1"
BROKEN = (pa.ArrowException, OSError, ValueError, LookupError, AttributeError)  # what a damaged file raises


class DamagedShard(UserError):
    """A token file that is cut short, altered, or no token file at all.

    Taught in chapter 02_packing.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"token file {path} is damaged ({what})", "its store makes it again")
        self.what = what


@dataclass(frozen=True, eq=False)
class TokenShard:
    """One shard's tokens, memory-mapped: `flat` (tokens,) uint16 or uint32, `offsets` (documents + 1,) int64.

    Document i is flat[offsets[i]:offsets[i + 1]], at least one token, without BOS. `text_bytes` is what the
    text took as UTF-8, `checksum` the CRC-32 of offsets and tokens.

    >>> shard = TokenShard(Path("a.arrow"), np.array([5, 6, 7]), np.array([0, 2, 3]), text_bytes=9, checksum=0)
    >>> shard.n_documents, shard.lengths.tolist()
    (2, [2, 1])

    Taught in chapter 02_packing.
    """

    path: Path
    flat: np.ndarray  # (tokens,)
    offsets: np.ndarray  # (documents + 1,)
    text_bytes: int
    checksum: int

    @property
    def n_documents(self) -> int:
        """Documents in the shard."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, without BOS: int64 (documents,)."""
        return np.diff(self.offsets)

    @classmethod
    def open(cls, path: Path, tokenizer_digest: str) -> "TokenShard":
        """Map a token file; reads its offsets, not its tokens.

        Raises UserError if it was made with another tokenizer, DamagedShard if it is no whole token file.

        Taught in chapter 02_packing.
        """
        if not path.exists():
            raise UserError(f"there is no token file {path}", "nanolearn makes it from the corpus")
        try:
            reader, labels = _open(path)
            batch = reader.get_batch(0)
            batch.validate()  # lengths against buffers: a wrong one would read outside the file and end the process
            column = batch.column("tokens")
            shard = cls(
                path=path,
                flat=column.values.to_numpy(zero_copy_only=True),
                offsets=column.offsets.to_numpy(zero_copy_only=True),
                text_bytes=int(labels["text_bytes"]),
                checksum=int(labels["checksum"]),
            )
            made_with, known = labels["tokenizer"], labels["format"] == FORMAT
        except BROKEN as error:
            raise DamagedShard(path, (str(error).splitlines() or ["?"])[0]) from None
        ends = len(shard.offsets) > 1 and (shard.offsets[0], shard.offsets[-1]) == (0, len(shard.flat))
        if not known or not ends or shard.lengths.min() < 1:
            raise DamagedShard(path, "offsets")
        if made_with != tokenizer_digest:
            happened = f"{path} was made with tokenizer {made_with[:12]}, not with {tokenizer_digest[:12]}"
            raise UserError(happened, "use the tokenizer of that run, or another NANOLEARN_CACHE")
        return shard

    def verify(self) -> "TokenShard":
        """Compare the checksum, reading all tokens once (about 0.1 s for 61 M tokens); raises DamagedShard."""
        if zlib.crc32(self.offsets.data, zlib.crc32(self.flat.data)) != self.checksum:
            raise DamagedShard(self.path, "checksum")
        return self


def _open(path: Path) -> tuple[pa.ipc.RecordBatchFileReader, dict[str, str]]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return reader, {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}


def token_file(folder: Path, name: str) -> Path:
    """Where the tokens of a shard lie in the folder of its corpus and tokenizer.

    >>> token_file(Path("tokens"), "data/shard_0.parquet").name
    'data--shard_0.arrow'

    Taught in chapter 02_packing.
    """
    return folder / f"{name.removesuffix('.parquet').replace('/', '--')}.arrow"


def read_labels(path: Path) -> dict[str, str]:
    """What a token file says of itself (tokenizer, checksum, source, shard, text_bytes); reads neither tokens nor
    offsets. Raises FileNotFoundError, DamagedShard. Taught in chapter 02_packing."""
    try:
        labels = _open(path)[1]
        return labels | {"checksum": str(int(labels["checksum"]))}
    except FileNotFoundError:
        raise
    except BROKEN as error:
        raise DamagedShard(path, (str(error).splitlines() or ["?"])[0]) from None


def write_arrow(sink: Path | pa.NativeFile, flat: np.ndarray, offsets: np.ndarray, labels: dict[str, str]) -> None:
    """Write one Arrow IPC file: a record batch with one column `tokens`, large_list<uint16 or uint32>.

    Nothing is copied in memory, so `flat` may be a map of a file that is larger than memory.

    Taught in chapter 02_packing.
    """
    values = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    schema = pa.schema([pa.field("tokens", column.type)], metadata=labels)
    # Without allow_64bit Arrow refuses an array of 2^31 values: other languages' readers stop there.
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.ipc.new_file(sink if isinstance(sink, pa.NativeFile) else str(sink), schema, options=options) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))


def tokenise(
    text: Path,
    path: Path,
    tokenizer: Tokenizer,
    labels: dict[str, str],
    threads: int,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Tokenise one Parquet file into one token file, whole or not at all; memory holds 1,024 documents at most.

    `labels` (source and shard) go into the file, `threads` encode, `on_bytes` is told the bytes of text of every
    part that is done. The caller holds the lock of `path`. Raises UserError if there is no text.

    Taught in chapter 02_packing.
    """
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
        stale.unlink(missing_ok=True)
    # Arrow wants an array's length before its content: tokens go to a nameless file first.
    with replacing(path) as temporary, tempfile.TemporaryFile(dir=path.parent) as spill:
        lengths, text_bytes, checksum = [np.zeros(1, dtype=np.int64)], 0, 0
        for texts in read_texts(text):
            arrays = [ids for ids in tokenizer.encode_batch(texts, threads) if len(ids)]
            lengths.append(np.array([len(ids) for ids in arrays], dtype=np.int64))
            for ids in arrays:
                checksum = zlib.crc32(ids.data, checksum)
                spill.write(ids.data)
            size = sum(len(part.encode()) for part in texts)
            text_bytes += size
            on_bytes(size)
        spill.flush()
        offsets = np.cumsum(np.concatenate(lengths))
        if not offsets[-1]:
            raise UserError(f"shard {labels['shard']} of {labels['source']} holds no text", f"look at {text}")
        made = {"checksum": str(zlib.crc32(offsets.data, checksum)), "text_bytes": str(text_bytes)}
        made |= {"tokenizer": tokenizer.digest, "format": FORMAT}
        write_arrow(temporary, np.memmap(spill, tokenizer.dtype, "r"), offsets, labels | made)
