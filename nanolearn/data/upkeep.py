"""A corpus in the cache: fetched side by side beforehand, and looked over for damage later.

Training needs neither: it fetches what it comes to, and compares what it reads. But a machine that will have no
network wants all of it beforehand, and a disk that lost a file wants to be told of the others.
"""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from nanolearn.data.hub import HubSource
from nanolearn.data.listing import arrived, whole
from nanolearn.data.shard import DamagedShard, TokenShard, read_labels
from nanolearn.data.sources import Source, open_source
from nanolearn.data.tokens import TOKENIZER, TokenStore
from nanolearn.errors import UserError
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import Tokenizer

SIDE_BY_SIDE = 4  # downloads: one connection seldom fills a line, and more than a few only annoy the server
LOOK = 0.25  # seconds between two looks at what has arrived


def to_fetch(source: Source, shards: Sequence[str]) -> dict[Path, int]:
    """The files that these shards are fetched into, and their sizes; nothing where the source can't tell.

    >>> to_fetch(open_source("embedded"), ["train_00000"])
    {}

    Taught in chapter 02_packing.
    """
    if not isinstance(source, HubSource):
        return {}
    return {path: file.size for file, path in map(source.downloads, shards)}


def fetch_all(source: Source, shards: Sequence[str], told: Callable[[int, int], None] = lambda *_: None) -> None:
    """Fetch shards, a few side by side; `told(bytes, shards)` hears 4 times a second how much is there.

    An interrupt leaves what has arrived, and a second call goes on from there. Raises the first UserError; what was
    being fetched meanwhile is kept.

    Taught in chapter 02_packing.
    """
    files, waiting, failed = to_fetch(source, shards), deque(shards), list[BaseException]()

    def work() -> None:
        while waiting and not failed:
            try:
                source.path(waiting.popleft())
            except IndexError:
                return
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(SIDE_BY_SIDE, len(shards)))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failed:
        threads[0].join(LOOK)
        threads = [thread for thread in threads if thread.is_alive()] or threads
        told(sum(map(arrived, files)), sum(path.exists() for path in files))
    if failed:
        raise failed[0]


class Part(NamedTuple):
    """A file of a corpus in the cache: `check` says what is wrong with it ("" if nothing), `mend` makes it anew."""

    path: Path
    check: Callable[[], str]
    mend: Callable[[], object]


def parts(spec: str) -> Iterator[Part]:
    """All files of a corpus that are here: text as it was fetched, text as it is read, tokens of every tokenizer.

    Taught in chapter 02_packing.
    """
    source = open_source(spec)
    names = {split: source.shards(split) for split in ("val", "train")}
    downloads = set()
    if isinstance(source, HubSource):
        for name in (*names["val"], *names["train"]):
            file, path = source.downloads(name)
            if path.exists() and path not in downloads:
                downloads.add(path)
                yield Part(path, partial(whole, file, path), partial(_anew, path, partial(source.fetch, name)))
    for name in (*names["val"], *names["train"]):
        path = cache_dir() / "corpora" / source.name / f"{name}.parquet"
        if path.exists():
            fetched = isinstance(source, HubSource) and path in source.fetched(name)
            alone = partial(_anew, path, partial(source.path, name))
            yield Part(path, partial(_unreadable, path), alone if fetched else partial(_write_corpus, spec, path))
    for folder in sorted((cache_dir() / "tokens").glob(f"{source.name}-*")):
        for path in sorted(folder.glob("*.arrow")):
            yield Part(path, partial(_unlike, path), partial(_anew, path, partial(_tokenise, source, names, path)))


def _anew(path: Path, make: Callable[[], object]) -> None:
    path.unlink(missing_ok=True)
    make()


def _unreadable(path: Path) -> str:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        for group in range(file.num_row_groups):
            file.read_row_group(group)
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return ""


def _write_corpus(spec: str, path: Path) -> None:
    """A corpus is written whole: its shards are split and mixed together."""
    if _unreadable(path):
        shutil.rmtree(path.parent)
        open_source(spec).shards("train")


def _unlike(path: Path) -> str:
    try:
        TokenShard.open(path, read_labels(path)["tokenizer"]).verify()
    except DamagedShard as damage:
        return damage.what
    return ""


def _tokenise(source: Source, names: dict[str, tuple[str, ...]], path: Path) -> None:
    tokenizer = Tokenizer.load(path.parent / TOKENIZER)
    for split in names:
        store = TokenStore(source, tokenizer, split)
        for index in range(store.n_shards):
            if store.path(index) == path:
                store.shard(index)
                return
    raise UserError(f"{path} belongs to no shard of {source.name} any more", "it was removed")
