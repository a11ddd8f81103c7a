"""Where text comes from: one function opens a source by its name, whatever lies behind it.

A source lists its shards in a fixed order, says how it splits training from validation, and hands out each shard as a
Parquet file with a column "text". All that follows (token shards, packing plans, rows) needs no more than that.
"""

import difflib
import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from nanolearn.data.corpus import Corpus
from nanolearn.data.embedded import embedded
from nanolearn.data.files import own_files, parquet_batches
from nanolearn.data.hub import KNOWN, DataSet, HubSource
from nanolearn.data.split import RULE
from nanolearn.errors import UserError
from nanolearn.fetch import disk_errors, download
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import clean

HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?P<folder>(/[\w. -]+)*)(@(?P<revision>[\w./-]+))?")
FORMS = "data is embedded, climbmix, fineweb-edu, hf:ORGANISATION/NAME, an address of a file, or a file or folder"


class Source(Protocol):
    """What every source offers.

    Taught in chapter 02_packing.
    """

    @property
    def name(self) -> str:
        """A short word that stands for one content: part of it is the digest."""

    @property
    def digest(self) -> str:
        """Stands for text, order and split (hex): another digest is another corpus."""

    @property
    def note(self) -> str:
        """One line to say aloud: what it is, its licence, how it is split."""

    @property
    def tokens_per_shard_hint(self) -> int | None:
        """About how many tokens a training shard holds."""

    @property
    def download_hint(self) -> int | None:
        """About how many bytes must be fetched for a training shard; 0 where nothing is."""

    def size_hint(self, split: str) -> int | None:
        """About how many bytes of text "train" or "val" holds, if that is known without reading them."""

    def shards(self, split: str) -> tuple[str, ...]:
        """The shards' names, in an order that never changes."""

    def path(self, shard: str) -> Path:
        """A shard as a Parquet file with a column "text" of strings, fetched or written if it isn't there."""


def open_source(spec: str) -> Source:
    """Open a corpus by its name.

    `embedded`; `climbmix` and `fineweb-edu` (Hub data sets that are known here); `hf:ORGANISATION/NAME[/FOLDER]`;
    the http(s) address of a .txt, .jsonl or .parquet file; a file or folder of such files. `@REVISION` behind a Hub
    data set pins a commit, `::COLUMN` behind anything names the column that holds the text.
    Raises UserError for a name that is none of these, with the nearest one that is.

    >>> source = open_source("climbmix")
    >>> source.tokens_per_shard_hint, source.size_hint("val")
    (61000000, 250000000)

    Taught in chapter 02_packing.
    """
    place, _, column = spec.partition("::")
    known, _, revision = place.partition("@")
    if place == "embedded":
        return embedded()
    if known in KNOWN:
        return HubSource(KNOWN[known], revision or "main", column or None)
    if match := HUB.fullmatch(place):
        slug = match["repo"].lower().replace("/", "-")
        data_set = DataSet(slug, match["repo"], match["folder"].strip("/"))
        return HubSource(data_set, match["revision"] or "main", column or None)
    if place.startswith("hf:"):
        raise UserError(f"{place} names no Hub data set", "write hf:ORGANISATION/NAME, as in hf:roneneldan/TinyStories")
    if place.startswith(("http://", "https://")):
        return AddressedFile(place, column or None)
    path = Path(place).expanduser()
    if not place or not path.exists():
        near = difflib.get_close_matches(place, ["embedded", *KNOWN], n=1)
        raise UserError(f"no corpus {place!r}", f"did you mean {near[0]}?" if near else FORMS)
    with disk_errors(path):
        return own_files(path, column or None)


class AddressedFile:
    """The file at an http(s) address as a source, fetched when its text is first asked for: a plan fetches nothing.

    Raises UserError for an address that names no file.

    >>> AddressedFile("https://example.org/tales.txt", None).size_hint("train") is None
    True

    Taught in chapter 02_packing.
    """

    tokens_per_shard_hint = None
    download_hint = None

    def __init__(self, url: str, column: str | None) -> None:
        name = PurePosixPath(unquote(urlsplit(url).path)).name
        if not name:
            raise UserError(f"{url} names no file", "give the address of a .txt, .jsonl or .parquet file")
        folder = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
        self._url, self._column = url, column
        self._path = cache_dir() / "downloads" / folder / name

    @cached_property
    def _corpus(self) -> Corpus:
        return own_files(download(self._url, self._path), self._column)

    @property
    def name(self) -> str:
        """The file's corpus is named after it."""
        return self._corpus.name

    @property
    def digest(self) -> str:
        """That of the file's corpus."""
        return self._corpus.digest

    @property
    def note(self) -> str:
        """The file's own note where it is here."""
        return self._corpus.note if self._path.exists() else f"{self._url}, fetched when it is first read; {RULE}"

    def size_hint(self, split: str) -> int | None:
        """Known once the file is here."""
        return self._corpus.size_hint(split) if self._path.exists() else None

    def shards(self, split: str) -> tuple[str, ...]:
        """Those of the file's corpus."""
        return self._corpus.shards(split)

    def path(self, shard: str) -> Path:
        """A shard of the file's corpus."""
        return self._corpus.path(shard)


class TextReader(Iterator[list[str]]):
    """Batches of a shard's documents; null and blank ones are left out and counted in `blank`."""

    def __init__(self, batches: Iterator[list[str | None]]) -> None:
        self._batches = batches
        self.blank = 0

    def __next__(self) -> list[str]:
        batch = next(self._batches)
        texts = [clean(text) for text in batch if text and not text.isspace()]
        self.blank += len(batch) - len(texts)
        return texts


def read_texts(path: Path, column: str = "text") -> TextReader:
    """The documents of a Parquet file in their order, in lists of at most 1,024 that don't cross a row group.

    Bytes that are no UTF-8 become U+FFFD. Raises UserError for a damaged file or a missing column.

    Taught in chapter 02_packing.
    """
    return TextReader(parquet_batches(Path(path), column))


def texts(source: Source, split: str = "train", max_bytes: int | None = None) -> Iterator[str]:
    """Documents of a split, shard after shard, up to about `max_bytes` of text: what a tokenizer is trained on.

    Shards that are not reached are not fetched.

    Taught in chapter 01_tokenizer.
    """
    taken = 0
    for shard in source.shards(split):
        for batch in read_texts(source.path(shard)):
            for text in batch:
                if max_bytes is not None and taken >= max_bytes:
                    return
                taken += len(text.encode())
                yield text
