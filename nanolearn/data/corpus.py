"""A corpus of documents, split and written once as Parquet shards in the cache.

Documents lie in the order of a hash, which mixes the sources: any prefix of the training shards looks like the whole,
so a short run and the tokenizer's sample see all of it. Sorting takes one shard's memory, whatever the corpus's size.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from nanolearn.data.split import ONE_IN, RULE, Split, hash_of
from nanolearn.errors import UserError
from nanolearn.fetch import locked, sync
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import clean

FORMAT = "1"  # part of every corpus's digest: another split or order is another corpus
ROW_GROUP = 1 << 20  # bytes of text that a reader holds at once
LIMIT = (1 << 31) - 1  # bytes of one document: Arrow's string offsets are 32-bit
BUCKET = pa.schema([("order", pa.uint64()), ("ident", pa.string()), ("text", pa.string())])
TEXT = pa.schema([("text", pa.string())])
# Texts hardly ever repeat, and their minimum and maximum help nobody; a checksum tells a flipped byte.
WRITING = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
MANIFEST = "manifest.json"


class Document(NamedTuple):
    """One text. `ident` ("source/id") decides its side of the split, `place` its position in the order."""

    ident: str
    place: str
    text: str


@dataclass
class Tally:
    """What reading finds besides documents: how many were null or blank, and remarks to be said aloud."""

    blank: int = 0
    remarks: list[str] = field(default_factory=list)


class Manifest(BaseModel):
    """manifest.json: what a written corpus holds; keys of the dictionaries are "train" and "val"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    digest: str
    rule: str
    shards: dict[str, list[str]]
    documents: dict[str, int]
    bytes: dict[str, int]
    blank: int
    remarks: list[str]


def count_shards(size: int) -> int:
    """Training shards for `size` bytes of text.

    About 4 MiB each at first: a shard's rows are permuted among themselves and the shards among each other, so a
    small corpus needs several; but far below a million tokens, the rows that packing leaves open where a shard ends
    would count. From 16 shards on they grow, to 64 MiB, which is what sorting one holds in memory; and beyond 512,
    for so many files are open at once while the corpus is dealt out.

    >>> [count_shards(mib << 20) for mib in (0, 16, 200, 1024, 10_240, 102_400)]
    [1, 4, 16, 16, 160, 512]

    Taught in chapter 02_packing.
    """
    return max(1, min(16, size >> 22), min(512, size >> 26))


class Corpus:
    """A source whose documents are written on first use to `cache_dir()/corpora/NAME/` and read from there.

    `documents(tally)` yields them in any order, `digest` stands for their content, `size` is about their bytes.
    Its methods are those of `nanolearn.data.sources.Source`.

    Taught in chapter 02_packing.
    """

    download_hint = 0  # a corpus is fetched whole, or lies on this machine

    def __init__(
        self, slug: str, digest: str, note: str, size: int, documents: Callable[[Tally], Iterator[Document]]
    ) -> None:
        self.digest = hashlib.blake2b(f"{FORMAT}/{digest}".encode(), digest_size=8).hexdigest()
        self.name = f"{slug}-{self.digest[:8]}"
        self.tokens_per_shard_hint = max(1, size // 4 // count_shards(size))  # a token holds about 4 bytes
        self._note, self._size, self._documents = note, size, documents

    @property
    def folder(self) -> Path:
        """Where its shards lie."""
        return cache_dir() / "corpora" / self.name

    @property
    def _written(self) -> bool:
        return (self.folder / MANIFEST).exists()

    @property
    def note(self) -> str:
        """What it is, its licence and its split, in one line; once written, also what reading it found."""
        found = [self.manifest.rule, *self.manifest.remarks] if self._written else [RULE]
        return "; ".join([self._note, *found])

    def size_hint(self, split: str) -> int | None:
        """Bytes of text in a split: exact once written, before that from what will be read."""
        if self._written:
            return self.manifest.bytes[split]
        held = self._size // ONE_IN
        return held if split == "val" else self._size - held

    def shards(self, split: str) -> tuple[str, ...]:
        """Names of the shards of "train" or "val", in their fixed order."""
        return tuple(self.manifest.shards[split])

    def path(self, shard: str) -> Path:
        """The Parquet file of a shard, with one column "text"."""
        if not any(shard in names for names in self.manifest.shards.values()):
            raise KeyError(shard)
        return self.folder / f"{shard}.parquet"

    @cached_property
    def manifest(self) -> Manifest:
        """What the corpus holds; writes it first if need be, whole or not at all."""
        with locked(self.folder):
            if not self._written:
                temporary = self.folder.with_name(f".{self.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)  # left by a killed writer: we hold the lock
                try:
                    self._write(temporary)
                    shutil.rmtree(self.folder, ignore_errors=True)
                    os.replace(temporary, self.folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        return Manifest.model_validate_json((self.folder / MANIFEST).read_bytes())

    def _write(self, folder: Path) -> None:
        """Two passes: into buckets by the leading bits of the order's hash, then each bucket sorted and split."""
        folder.mkdir(parents=True)
        tally, split = Tally(), Split()
        buckets = self._scatter(folder, tally, split)
        sides = {"train": _Shards(folder, "train"), "val": _Shards(folder, "val")}
        for bucket in buckets:
            rows = pq.read_table(bucket, memory_map=False).to_pylist()
            for row in sorted(rows, key=lambda row: (row["order"], row["ident"])):
                for side, text in split.sides(row["ident"], row["text"]):
                    sides[side].add(text)
            sides["train"].close()
            bucket.unlink()
        sides["val"].close()
        manifest = Manifest(
            name=self.name,
            digest=self.digest,
            rule=split.rule,
            shards={side: shards.names for side, shards in sides.items()},
            documents={side: shards.documents for side, shards in sides.items()},
            bytes={side: shards.bytes for side, shards in sides.items()},
            blank=tally.blank,
            remarks=tally.remarks + ([f"{tally.blank:,} blank documents skipped"] if tally.blank else []),
        )
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
        sync(folder / MANIFEST)

    def _scatter(self, folder: Path, tally: Tally, split: Split) -> list[Path]:
        buckets = [_Rows(folder / f"bucket_{i:05d}.parquet", BUCKET) for i in range(count_shards(self._size))]
        for ident, place, text in self._documents(tally):
            text = clean(text)
            if not text.strip():
                tally.blank += 1
                continue
            split.see(ident)
            order = hash_of(place)
            buckets[order * len(buckets) >> 64].add((order, ident, text), len(text.encode()))
        for bucket in buckets:
            bucket.close()
        if not split.only:
            skipped = f" but {tally.blank:,} blank documents" if tally.blank else ""
            raise UserError(f"{self._note}: no text in it{skipped}", "give files with text")
        return [bucket.path for bucket in buckets if bucket.path.exists()]


def write_texts(path: Path, texts: Iterable[str | None]) -> None:
    """Write texts as a Parquet file with one column "text"; null and blank ones are left out.

    Taught in chapter 02_packing.
    """
    rows = _Rows(path, TEXT)
    for text in texts:
        if text and not text.isspace():
            rows.add((text,), len(text.encode()))
    rows.close()


class _Rows:
    """A Parquet file that appears with its first row; rows leave for the disk when they fill a row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self._schema = path, schema
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple] = []
        self._bytes = 0

    def add(self, row: tuple, size: int) -> None:
        if size > LIMIT:
            raise UserError(f"a document of {size:,} bytes", "cut it: one document may hold 2 GiB")
        if self._bytes + size > ROW_GROUP:
            self._flush()
        self._rows.append(row)
        self._bytes += size

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, self._schema, **WRITING)
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, self._schema.types, strict=True)]
        self._writer.write_table(pa.table(arrays, schema=self._schema))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            sync(self.path)


class _Shards:
    """The numbered shards of one side of the split; `close` ends the current one, the next text opens another."""

    def __init__(self, folder: Path, side: str) -> None:
        self._folder, self._side = folder, side
        self._current: _Rows | None = None
        self.names: list[str] = []
        self.documents = self.bytes = 0

    def add(self, text: str) -> None:
        if self._current is None:
            self.names.append(f"{self._side}_{len(self.names):05d}")
            self._current = _Rows(self._folder / f"{self.names[-1]}.parquet", TEXT)
        size = len(text.encode())
        self._current.add((text,), size)
        self.documents += 1
        self.bytes += size

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
