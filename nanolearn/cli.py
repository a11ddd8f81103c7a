"""The command line: `nanolearn doctor | plan | data | run`.

What a person can cause ends in one line and exit code 2, an interrupt in 130, a refused plan in 1. Everything heavy
is imported where it is used, so that --help answers at once.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanolearn.errors import UserError

if TYPE_CHECKING:
    from nanolearn.data.sources import Source

REFUSED, USER_ERROR, INTERRUPTED = 1, 2, 130
BOOK = ("embedded",)  # the corpora that the chapters need
MUCH = 20e9  # bytes that nobody should fetch without having said how much
SHOWN = 300  # characters of a document


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["plan", "--depth", "0"])
    2
    """
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except UserError as error:
        print(f"nanolearn: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line.

    >>> parser().parse_args(["plan", "--depth", "24"]).depth
    24
    """
    top = argparse.ArgumentParser(prog="nanolearn", description="Pre-train a GPT, and know beforehand what it takes.")
    commands = top.add_subparsers(title="commands", required=True, metavar="doctor | plan | data | run")
    _doctor_options(commands.add_parser("doctor", help="say what this installation can do and what is wrong with it"))
    _plan_options(commands.add_parser("plan", help="say what a run needs and costs, before it starts"))
    _data_options(commands.add_parser("data", help="list, fetch, tokenise or look at text"))
    _run_options(commands.add_parser("run", help="run a chapter's notebook headless, with parameters"))
    return top


def _doctor_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--online", action="store_true", help="also ask whether the Hugging Face Hub can be reached")
    command.set_defaults(command=_doctor)


def _plan_options(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Prints parameters, tokens, memory, hours, cost and disk of a run. Exit code 1 if it is refused. "
        'Example: nanolearn plan --depth 24 --gpus 8 --device "NVIDIA H100 80GB HBM3" --ratio 8'
    )
    command.add_argument(
        "--depth", type=int, default=4, help="layers; with the preset it decides the rest (default: %(default)s)"
    )
    command.add_argument("--preset", default="auto", help="auto, full, gpu or laptop (default: by the device)")
    command.add_argument(
        "--device", metavar="NAME", help="plan for this device, as torch names it (default: this machine's)"
    )
    command.add_argument(
        "--gpus", type=int, metavar="N", help="how many of them (default: 1 named, or all that are here)"
    )
    command.add_argument("--data", default="auto", help="the corpus (default: by the preset)")
    command.add_argument("--ratio", metavar="R", help="tokens for each weight of blocks and head")
    command.add_argument("--overrides", default="", help='any other number: "window=L micro_batch=8"')
    command.add_argument("--price", metavar="DOLLARS", help="of one device for an hour")
    command.add_argument(
        "--mfu", type=float, metavar="SHARE", help="the share of the peak that you expect, such as 0.4"
    )
    command.add_argument("--json", action="store_true", help="for machines")
    command.set_defaults(command=_plan)


def _data_options(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(title="actions", required=True, metavar="list | fetch | tokens | show")
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
    show = actions.add_parser("show", help="print the beginnings of some documents")
    show.add_argument("name", nargs="?", default="embedded")
    show.add_argument("--documents", type=int, default=3, metavar="N")
    show.set_defaults(command=_data_show)
    for action in (fetch, tokens):
        action.add_argument("--shards", type=int, metavar="N", help="only the first N training shards")


def _run_options(command: argparse.ArgumentParser) -> None:
    command.description = "Example: nanolearn run 07 -p depth 6 -p overrides 'steps=200'"
    command.add_argument("chapter", help="its number, such as 07, or its name")
    for flag, name, about in (
        ("-p", "parameters", "a parameter of the notebook"),
        ("-r", "texts", "a parameter that stays text, whatever it looks like"),
    ):
        command.add_argument(
            flag, dest=name, help=about, nargs=2, action="append", default=[], metavar=("NAME", "VALUE")
        )
    command.add_argument("--out", type=Path, help="the executed notebook (default: out/CHAPTER.ipynb)")
    command.set_defaults(command=_run)


def _doctor(options: argparse.Namespace) -> int:
    from nanolearn import doctor

    checks = doctor.examine(options.online)
    print(*checks, sep="\n")
    return REFUSED if any(check.remedy for check in checks) else 0


def _plan(options: argparse.Namespace) -> int:
    from nanolearn.hardware import detect, named
    from nanolearn.plan import make_plan
    from nanolearn.recipe import build

    machine = named(options.device, 1 if options.gpus is None else options.gpus) if options.device else detect()
    asked = {"ratio": options.ratio, "price": options.price, "num_devices": options.gpus}
    wishes = [options.overrides, *(f"{name}={value}" for name, value in asked.items() if value is not None)]
    recipe, execution = build(options.depth, options.preset, options.data, 0, " ".join(wishes), machine)
    plan = make_plan(recipe, execution, machine, mfu=options.mfu)
    print(plan.to_json() if options.json else plan.text())
    return 0 if plan.finishes else REFUSED


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

    names = [*BOOK] if options.book else []
    names += [options.name] if options.name else []
    if not names:
        raise UserError("no corpus is named", "give its name, or --book")
    for name in names:
        source = open_source(name)
        print(source.note)
        for shard in _wanted(source, options.shards):
            print(source.path(shard), flush=True)
    return 0


def _wanted(source: "Source", limit: int | None) -> list[str]:
    """The validation shards and the first training shards; a corpus of many downloads asks how many."""
    train = source.shards("train")
    size = (source.download_hint or 0) * len(train)
    if limit is None and size > MUCH:
        remedy = "say how many with --shards N; training fetches the ones it comes to by itself"
        raise UserError(f"{source.name} has {len(train):,} shards, {size / 1e9:,.0f} GB", remedy)
    return [*source.shards("val"), *train[:limit]]


def _data_tokens(options: argparse.Namespace) -> int:
    from nanolearn.data.sources import open_source
    from nanolearn.data.tokens import TokenStore
    from nanolearn.presets import PRESETS
    from nanolearn.recipe import Recipe
    from nanolearn.train.launch import prepare

    _wanted(open_source(options.name), options.shards)
    entries = PRESETS["laptop"].vocab_size if options.vocab_size is None else options.vocab_size
    recipe = Recipe.from_depth(4, "laptop", data=options.name, vocab_size=entries)
    source, tokenizer = prepare(recipe)
    for split in ("train", "val"):
        store = TokenStore(source, tokenizer, split, max_shards=options.shards if split == "train" else None)
        store.prepare()
        shards = [store.shard(index) for index in range(store.n_shards)]
        tokens, size = sum(len(shard.flat) for shard in shards), sum(shard.text_bytes for shard in shards)
        documents = sum(shard.n_documents for shard in shards)
        print(f"{split:6}{documents:,} documents, {tokens:,} tokens, {size / max(tokens, 1):.2f} bytes a token")
        print(f"{'':6}{store.path(0).parent}")
    return 0


def _data_show(options: argparse.Namespace) -> int:
    from nanolearn.data.sources import open_source, texts

    source = open_source(options.name)
    print(source.note)
    for number, text in zip(range(options.documents), texts(source), strict=False):
        print(f"\n--- document {number}, {len(text.encode()):,} bytes\n{text[:SHOWN].strip()}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from nanolearn.paths import home

    notebook = find_notebook(options.chapter, home() / "notebooks")
    check_names(notebook, [name for name, _ in (*options.parameters, *options.texts)])
    out = options.out or Path("out") / notebook.name
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", "--log-output", "--no-progress-bar", str(notebook), str(out)]
    command += [word for pair in options.parameters for word in ("-p", *pair)]
    command += [word for pair in options.texts for word in ("-r", *pair)]
    code = subprocess.run(command).returncode
    print(f"executed notebook: {out.resolve()}")
    return code


def find_notebook(chapter: str, folder: Path) -> Path:
    """The notebook of a chapter, by number ("07" or "7") or name. Raises UserError, listing what there is.

    >>> find_notebook("99", Path("nowhere"))
    Traceback (most recent call last):
    nanolearn.errors.UserError: no chapter '99' in nowhere: run this in the project's checkout
    """
    there = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    wanted = chapter.removesuffix(".ipynb")
    for path in there:
        number = path.stem.split("_")[0]
        if wanted in (path.stem, number) or (wanted.isdigit() and int(wanted) == int(number)):
            return path
    names = ", ".join(path.stem for path in there)
    raise UserError(
        f"no chapter {chapter!r} in {folder}", f"give one of {names}" if names else "run this in the project's checkout"
    )


def check_names(notebook: Path, names: Sequence[str]) -> None:
    """Refuse a parameter that the notebook does not declare, before papermill starts (it only warns).

    Raises UserError with the nearest name.
    """
    from nanolearn.lab import params

    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    declared = params.declaration(["".join(cell["source"]) for cell in tagged])
    for name in names:
        if name not in declared:
            raise params.unknown(name, declared)
