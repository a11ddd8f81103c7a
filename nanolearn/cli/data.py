"""`nanolearn data`: list, fetch, tokenise, verify or look at text."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nanolearn.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

    from nanolearn.data.sources import Source

BOOK = ("embedded",)  # the corpora that the chapters need
MUCH = 20e9  # bytes that nobody should fetch without having said how much
SHOWN = 300  # characters of a document


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command.

    >>> parser = argparse.ArgumentParser()
    >>> add(parser.add_subparsers())
    >>> parser.parse_args(["data", "fetch", "--book"]).book
    True

    Taught in chapter 07_pretrain.
    """
    command = commands.add_parser("data", help="list, fetch, tokenise, verify or look at text")
    actions = command.add_subparsers(title="actions", required=True, metavar="list | fetch | tokens | verify | show")
    actions.add_parser("list", help="the corpora that are known by name").set_defaults(command=_data_list)
    fetch = actions.add_parser("fetch", help="download a corpus, so that training needs no network")
    fetch.add_argument(
        "name", nargs="?", help="embedded, climbmix, fineweb-edu, hf:ORGANISATION/NAME, a file or folder"
    )
    fetch.add_argument("--book", action="store_true", help="all that the book's chapters need")
    fetch.set_defaults(command=_data_fetch)
    tokens = actions.add_parser("tokens", help="train the tokenizer of a corpus and turn its text into tokens")
    tokens.add_argument("name")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="default: that of the laptop preset")
    tokens.set_defaults(command=_data_tokens)
    verify = actions.add_parser("verify", help="compare what is in the cache with the checksums it should have")
    verify.add_argument("name")
    verify.add_argument("--repair", action="store_true", help="fetch or make anew what is damaged")
    verify.set_defaults(command=_data_verify)
    show = actions.add_parser("show", help="print the beginnings of some documents")
    show.add_argument("name", nargs="?", default="embedded")
    show.add_argument("--documents", type=counted, default=3, metavar="N")
    show.set_defaults(command=_data_show)
    for action in (fetch, tokens):
        action.add_argument("--shards", type=counted, metavar="N", help="only the first N training shards")


def counted(text: str) -> int:
    """A whole number of 1 or more, for argparse.

    >>> counted("3")
    3
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return int(text)


def _data_list(options: argparse.Namespace) -> int:
    from nanolearn.data.hub import KNOWN
    from nanolearn.data.sources import FORMS, open_source
    from nanolearn.paths import cache_dir

    for name in ("embedded", *KNOWN):
        print(f"{name:14}{open_source(name).note}")
    print(f"{FORMS}\nkept in {cache_dir()}")
    return 0


def _data_fetch(options: argparse.Namespace) -> int:
    from nanolearn.data.sources import open_source

    if options.book:
        from nanolearn.published import NAMES, published

        for vocabulary in NAMES:
            print(f"vocabulary of {published(vocabulary).name}")
    names = [*BOOK] if options.book else []
    names += [options.name] if options.name else []
    if not names:
        raise UserError("no corpus is named", "give its name, or --book")
    for name in names:
        source = open_source(name)
        print(source.note)
        for shard in _fetched(source, _wanted(source, options.shards)):
            print(source.path(shard))
    return 0


@contextmanager
def _resumable() -> Iterator[None]:
    """Say what an interrupt leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped: what is there is kept, and the same command goes on from it", file=sys.stderr)
        raise


def _bar(total: int | None, what: str, initial: int = 0) -> "tqdm":
    """A progress line in bytes, with rate and time left; none where no person watches (a log, a pipe)."""
    from tqdm import tqdm

    return tqdm(total=total, initial=initial, desc=what, unit="B", unit_scale=True, disable=None, file=sys.stderr)


def _fetched(source: "Source", shards: Sequence[str]) -> Sequence[str]:
    """The same shards, all of them here."""
    from nanolearn.data.listing import arrived
    from nanolearn.data.upkeep import fetch_all, to_fetch

    files = to_fetch(source, shards)
    said = sum(path.exists() for path in files)
    with _resumable(), _bar(sum(files.values()) or None, "fetching", sum(map(arrived, files))) as bar:

        def told(size: int, count: int) -> None:
            nonlocal said
            line = f"{count:,} of {len(files):,} files"
            if bar.disable and count > said:
                print(line, flush=True)
            said = count
            bar.set_postfix_str(line, refresh=False)
            bar.update(size - bar.n)

        fetch_all(source, shards, told)
    return shards


def _wanted(source: "Source", limit: int | None) -> list[str]:
    """The validation shards and the first training shards; a corpus of many downloads asks how many."""
    train = source.shards("train")
    size = (source.download_hint or 0) * len(train)
    if limit is None and size > MUCH:
        remedy = "say how many with --shards N; training fetches the ones it comes to by itself"
        raise UserError(f"{source.name} has {len(train):,} shards, {size / 1e9:,.0f} GB", remedy)
    return [*source.shards("val"), *train[:limit]]


def _data_tokens(options: argparse.Namespace) -> int:
    from nanolearn.data.files import text_size
    from nanolearn.data.sources import open_source
    from nanolearn.data.tokens import TokenStore
    from nanolearn.presets import PRESETS
    from nanolearn.recipe import Recipe
    from nanolearn.train.launch import prepare

    source = open_source(options.name)
    _fetched(source, _wanted(source, options.shards))
    entries = PRESETS["laptop"].vocab_size if options.vocab_size is None else options.vocab_size
    with _resumable():
        source, tokenizer = prepare(Recipe.from_depth(4, "laptop", data=options.name, vocab_size=entries))
        for split in ("train", "val"):
            limit = options.shards if split == "train" else None
            names = source.shards(split)[:limit]
            with _bar(sum(text_size(source.path(name), "text") for name in names), f"tokenising {split}") as bar:
                told = partial(_advance, bar)
                store = TokenStore(source, tokenizer, split, max_shards=limit, progress=told, say=bar.write)
                store.prepare()
            shards = [store.shard(index) for index in range(store.n_shards)]
            tokens, size = sum(len(shard.flat) for shard in shards), sum(shard.text_bytes for shard in shards)
            documents = sum(shard.n_documents for shard in shards)
            print(f"{split:6}{documents:,} documents, {tokens:,} tokens, {size / max(tokens, 1):.2f} bytes a token")
            print(f"{'':6}{store.path(0).parent}")
    return 0


def _advance(bar: "tqdm", done: int, _: int | None) -> None:
    bar.update(done - bar.n)


def _data_verify(options: argparse.Namespace) -> int:
    """0 if all is whole in the end, 1 if something is damaged."""
    from nanolearn.data.upkeep import parts

    here = list(parts(options.name))
    damaged = count = size = 0
    with _resumable(), _bar(sum(part.path.stat().st_size for part in here), "comparing") as bar:
        for part in here:
            bytes_ = part.path.stat().st_size if part.path.exists() else 0  # a corpus that was mended has new files
            if wrong := part.check():
                bar.write(f"damaged: {part.path} ({wrong})", file=sys.stdout)
                damaged += 1
                if options.repair:
                    part.mend()
                    bar.write(f"{'':9}made anew", file=sys.stdout)
            bar.update(bytes_)
            count, size = count + 1, size + bytes_
    print(f"{options.name}: {count:,} files here, {size / 1e9:.3g} GB, {damaged:,} damaged")
    if damaged and not options.repair:
        print("--repair fetches or makes them anew", file=sys.stderr)
    return int(damaged > 0 and not options.repair)


def _data_show(options: argparse.Namespace) -> int:
    from nanolearn.data.sources import open_source, texts

    source = open_source(options.name)
    print(source.note)
    for number, text in zip(range(options.documents), texts(source), strict=False):
        print(f"\n--- document {number}, {len(text.encode()):,} bytes\n{text[:SHOWN].strip()}")
    return 0
