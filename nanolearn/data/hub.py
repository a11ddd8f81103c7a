"""Corpora on the Hugging Face Hub: every Parquet file a shard, one of them pinned for validation.

If the pinned shard is missing that is an error, for any other shard in its place is one that somebody trains on.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nanolearn.data.corpus import Corpus, Document, Tally, write_texts
from nanolearn.data.files import parquet_batches, text_column
from nanolearn.data.listing import HubFile, Listing, fetch_shard, listing, place, stored
from nanolearn.errors import UserError
from nanolearn.fetch import locked, replacing
from nanolearn.paths import cache_dir


@dataclass(frozen=True)
class DataSet:
    """What is known of a Hub data set before it is asked for: hints (per training shard) cost no network.

    `validation` pins a file by name; without it the last file of the first list is held out, and stays so.
    """

    slug: str
    repo: str
    folder: str = ""
    about: str = "its card states the licence"
    validation: str | None = None
    train_shards: int | None = None
    shard_tokens: int | None = None
    shard_text: int | None = None  # bytes
    shard_download: int | None = None  # bytes


KNOWN = {
    "climbmix": DataSet(
        slug="climbmix",
        repo="karpathy/climbmix-400b-shuffle",
        about="ClimbMix, 400 billion tokens of filtered web text (CC BY-NC 4.0)",
        validation="shard_06542.parquet",
        train_shards=6_542,
        shard_tokens=61_000_000,
        shard_text=250_000_000,
        shard_download=100_000_000,
    ),
    "fineweb-edu": DataSet(
        slug="fineweb-edu",
        repo="HuggingFaceFW/fineweb-edu",
        folder="sample/100BT",
        about="FineWeb-Edu's sample of 100 billion tokens of educational web text (ODC-By 1.0)",
        validation="000_00000.parquet",
        train_shards=139,
        shard_tokens=710_000_000,
        shard_text=3_200_000_000,
        shard_download=2_000_000_000,
    ),
}


class HubSource:
    """A data set on the Hub as a source: every Parquet file a shard, one of them pinned for validation.

    A data set of a single file is fetched and split by hash instead. `name`, `digest`, `shards` and `path` need the
    listing (the network, the first time); notes and hints don't. Methods are those of
    `nanolearn.data.sources.Source`.

    >>> print(HubSource(KNOWN["climbmix"]).note[-44:])
    validation is the pinned shard_06542.parquet

    Taught in chapter 02_packing.
    """

    def __init__(self, data_set: DataSet, revision: str = "main", column: str | None = None) -> None:
        self._set, self._revision, self._column = data_set, revision, column
        held = "its last Parquet file when first listed here, "
        held += "or 1 document in 20 by its hash if it has only one"
        if data_set.validation:
            held = f"the pinned {data_set.validation}"
        whole = "/".join(filter(None, [data_set.repo, data_set.folder]))
        self.note = f"{whole} on the Hugging Face Hub at {revision}: {data_set.about}; validation is {held}"
        self.tokens_per_shard_hint = data_set.shard_tokens
        self.download_hint = data_set.shard_download

    @cached_property
    def _listing(self) -> Listing:
        found = listing(self._set.repo, self._set.folder, self._revision)
        if not found.files:
            remedy = f"try hf:{self._set.repo}@refs/convert/parquet, the Hub's own conversion"
            raise UserError(f"{self._set.repo} holds no Parquet file", remedy)
        return found

    @cached_property
    def _files(self) -> dict[str, HubFile]:
        """By shard name: the file's path below the folder, on one level and without its suffix."""
        base = f"{self._set.folder}/" if self._set.folder else ""
        inner = [file.path.removeprefix(base).removesuffix(".parquet") for file in self._listing.files]
        return {name.replace("/", "--"): file for name, file in zip(inner, self._listing.files, strict=True)}

    @cached_property
    def digest(self) -> str:
        """Stands for the files and the split."""
        state = f"{self._set.repo}@{self._listing.revision}/{self._set.folder}::{self._column}/{self._held}"
        return hashlib.blake2b(state.encode(), digest_size=8).hexdigest()

    @property
    def name(self) -> str:
        """Slug and digest."""
        return f"{self._set.slug}-{self.digest[:8]}"

    @property
    def _held(self) -> str:
        remedy = "no other shard can stand for it; name a revision that has it as NAME@REVISION"
        held = (self._set.validation or "").removesuffix(".parquet")
        if not held:
            path = place(self._set.repo, self._set.folder, ".validation")
            held = self._remembered(path)
            remedy += f", or remove {path} to choose anew"
        if held not in self._files:
            raise UserError(f"the validation shard {held}.parquet is missing from {self._set.repo}", remedy)
        return held

    def _remembered(self, path: Path) -> str:
        """The shard that was held out when this data set was first listed, whatever other revisions list last."""
        if len(self._files) == 1 and not path.exists():
            return next(iter(self._files))  # split by hash: it is no validation shard
        with locked(path):
            if not path.exists():
                with replacing(path) as temporary:
                    temporary.write_text(list(self._files)[-1], encoding="utf-8")
        return path.read_text(encoding="utf-8")

    @cached_property
    def _single(self) -> Corpus | None:
        """The corpus that a data set of one file becomes."""
        if len(self._files) > 1 or self._set.validation:
            return None
        (file,) = self._files.values()
        about = f"{self._set.repo} on the Hugging Face Hub: {self._set.about}"
        return Corpus(self._set.slug, self.digest, about, 4 * file.size, self._documents)

    def _documents(self, tally: Tally) -> Iterator[Document]:
        (file,) = self._files.values()
        path = fetch_shard(self._listing, file)
        rows = (text for batch in parquet_batches(path, text_column(path, self._column)) for text in batch)
        for row, text in enumerate(rows):
            ident = f"{self._set.repo}/{row}"
            yield Document(ident, ident, text or "")

    def shards(self, split: str) -> tuple[str, ...]:
        """Names of the shards of "train" or "val", in their fixed order."""
        if self._single:
            return self._single.shards(split)
        if split == "val":
            return (self._held,)
        return tuple(name for name in self._files if name != self._held)

    def path(self, shard: str) -> Path:
        """The Parquet file of a shard, with a column "text"; fetches it if need be.

        Where the text has another column's name, it is written once more under the name "text".
        """
        if self._single:
            return self._single.path(shard)
        renamed = self._renamed(shard)
        if renamed.exists():
            return renamed
        fetched = self.fetch(shard)
        column = text_column(fetched, self._column)
        if column == "text":
            return fetched
        with locked(renamed):
            if not renamed.exists():
                with replacing(renamed) as temporary:
                    write_texts(temporary, (text for batch in parquet_batches(fetched, column) for text in batch))
        return renamed

    def _renamed(self, shard: str) -> Path:
        return cache_dir() / "corpora" / self.name / f"{shard}.parquet"

    def downloads(self, shard: str) -> tuple[HubFile, Path]:
        """What the Hub states of a shard's file, and where it lies once fetched.

        For a data set of one file, that is every shard's.
        """
        file = next(iter(self._files.values())) if self._single else self._files[shard]
        return file, stored(self._listing, file)

    def fetch(self, shard: str) -> Path:
        """A shard's file as the Hub has it, whatever its columns are called."""
        return fetch_shard(self._listing, self.downloads(shard)[0])

    def fetched(self, shard: str) -> tuple[Path, ...]:
        """The files that a shard's text was fetched into, there or not: they can be had again."""
        return () if self._single else (self.downloads(shard)[1], self._renamed(shard))

    def size_hint(self, split: str) -> int | None:
        """Bytes of text in a split, about; None for a data set that nobody has described."""
        if self._set.shard_text is None or self._set.train_shards is None:
            return None
        return self._set.shard_text * (1 if split == "val" else self._set.train_shards)
