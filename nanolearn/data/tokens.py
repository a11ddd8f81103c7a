"""Token shards: each Parquet shard of text is tokenised once, into one memory-mapped Arrow file.

Tokens cost 50 times more to make than to read, so they are made once for a corpus and a tokenizer and then
shared by all ranks and runs through the page cache. Documents lie back to back without BOS; the loader adds
it. A shard names the tokenizer it was made with and carries a checksum: tokens of another tokenizer, or of
half a file, would train without any error. All positions are 64-bit: 2^31 tokens are an ordinary shard of a
large corpus.
"""

import contextlib
import multiprocessing
import os
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from nanolearn.data.sources import Source, read_texts
from nanolearn.errors import UserError
from nanolearn.fetch import locked, replacing
from nanolearn.host import cores
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import Tokenizer

FORMAT = "1"
OPEN_SHARDS = 8  # files kept mapped; a corpus has thousands

Progress = Callable[[int, int | None], None]


class DamagedShard(UserError):
    """A token file that is cut short, altered, or no token file at all.

    Taught in chapter 02_packing.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"token file {path} is damaged ({what})", "its store makes it again")


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
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            labels = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
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
        except (pa.ArrowException, OSError, ValueError, LookupError, AttributeError) as error:
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
    text: Path, path: Path, tokenizer: Tokenizer, labels: dict[str, str], on_bytes: Callable[[int], None]
) -> None:
    """Tokenise one Parquet file into one token file, whole or not at all; memory holds 1,024 documents at most.

    `labels` (source and shard) go into the file, `on_bytes` is told the bytes of text of every part that is
    done. The caller holds the lock of `path`. Raises UserError if there is no text.

    Taught in chapter 02_packing.
    """
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
        stale.unlink(missing_ok=True)
    # Arrow wants an array's length before its content: tokens go to a nameless file first.
    with replacing(path) as temporary, tempfile.TemporaryFile(dir=path.parent) as spill:
        lengths, text_bytes, checksum = [np.zeros(1, dtype=np.int64)], 0, 0
        for texts in read_texts(text):
            arrays = [ids for ids in tokenizer.encode_batch(texts, cores()) if len(ids)]
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


class TokenStore:
    """The token shards of one split: `names` in the source's fixed order, each tokenised when it is first asked for.

    They lie in `cache_dir()/tokens/SOURCE-TOKENIZER/` and are shared: whoever comes first makes a shard under
    its lock, the others wait for it. `max_shards` keeps the first ones only. `progress(done, total)` is told
    bytes of text (total None if the source doesn't know), `say` hears what a person should know. Raises
    UserError if the source has no shard of that split.

    Taught in chapter 02_packing.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        split: str,
        max_shards: int | None = None,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        every = tuple(source.shards(split))
        self.names = every[:max_shards]
        if not self.names:
            raise UserError(f"{source.name} has no {split} shard", "no other shard may stand in for it")
        self.source, self.tokenizer = source, tokenizer
        self.folder = cache_dir() / "tokens" / f"{source.name}-{tokenizer.digest[:12]}"
        hint = source.size_hint(split)
        self._total = hint and hint * len(self.names) // len(every)
        self._done = [0] * len(self.names)
        self._progress, self._say = progress, say
        self._mapped = lru_cache(maxsize=OPEN_SHARDS)(self._ready)
        self._helper: threading.Thread | None = None

    @property
    def n_shards(self) -> int:
        """Shards of this split."""
        return len(self.names)

    def path(self, index: int) -> Path:
        """Where the tokens of a shard lie, made or not."""
        return self.folder / f"{self.names[index].removesuffix('.parquet').replace('/', '--')}.arrow"

    def is_complete(self) -> bool:
        """Whether every shard has been tokenised."""
        return all(self.path(index).exists() for index in range(self.n_shards))

    def shard(self, index: int) -> TokenShard:
        """One shard, mapped; tokenises it first, or waits for the process that does.

        A damaged file is said aloud and made again. Raises UserError if the shard holds no text, or if its
        tokens were made with another tokenizer.
        """
        return self._mapped(index)

    def prepare(self) -> None:
        """Tokenise all shards now: what a corpus below 100 MB gets before step 0."""
        for index in range(self.n_shards):
            self.shard(index)

    def ahead(self, index: int) -> None:
        """Start to tokenise a shard in a process of its own, unless it is there or another is being made.

        The process works beside training without Python's lock, ends with this one, and there is one a
        machine. What goes wrong in it is met again, and raised, by `shard(index)`.
        """
        busy = self._helper is not None and self._helper.is_alive()
        if busy or self.path(index).exists() or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        self._helper = threading.Thread(target=self._tokenise_apart, args=(index,), daemon=True)
        self._helper.start()

    def _tokenise_apart(self, index: int) -> None:
        # spawn, because a fork of a process that holds an accelerator breaks.
        with contextlib.suppress(UserError, OSError):
            task = (self.source.path(self.names[index]), self.path(index), self.tokenizer, self._labels(index))
            worker = multiprocessing.get_context("spawn").Process(target=_worker, args=task, daemon=True)
            worker.start()
            worker.join()

    def _labels(self, index: int) -> dict[str, str]:
        return {"source": self.source.name, "shard": self.names[index]}

    def _ready(self, index: int) -> TokenShard:
        found = self._look(index)
        if isinstance(found, str):
            with locked(self.path(index)):
                found = self._look(index)
                if isinstance(found, str):
                    found = self._make(index, found)
        self._advance(index, found.text_bytes - self._done[index])
        return found

    def _look(self, index: int) -> TokenShard | str:
        """The shard, or what is wrong with its file ("" if there is none)."""
        if not self.path(index).exists():
            return ""
        try:
            return TokenShard.open(self.path(index), self.tokenizer.digest).verify()
        except DamagedShard as damage:
            return str(damage)

    def _make(self, index: int, damage: str) -> TokenShard:
        if damage:
            self._say(damage)
        self._done[index] = 0
        text, path = self.source.path(self.names[index]), self.path(index)
        tokenise(text, path, self.tokenizer, self._labels(index), lambda size: self._advance(index, size))
        return TokenShard.open(path, self.tokenizer.digest)

    def _advance(self, index: int, size: int) -> None:
        self._done[index] += size
        if self._progress and size:
            self._progress(sum(self._done), self._total)


def _worker(text: Path, path: Path, tokenizer: Tokenizer, labels: dict[str, str]) -> None:
    """Tokenise in a process of its own; stops when the process that wanted it is gone."""
    parent = multiprocessing.parent_process()

    def stop_if_orphaned(text_bytes: int) -> None:
        if parent is not None and not parent.is_alive():
            raise SystemExit

    with contextlib.suppress(UserError), locked(path):
        if not path.exists():
            tokenise(text, path, tokenizer, labels, stop_if_orphaned)
