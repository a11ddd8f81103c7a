"""What a run is: recipe, tokenizer and data, written into its folder and compared before anything is learnt.

A folder belongs to one run. Whatever would make a resumed run another one (promise 2) is refused here, naming the
difference, while nothing on disk has changed yet.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from nanolearn import distributed
from nanolearn.data.sources import Source
from nanolearn.data.tokens import TokenStore
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.fetch import replacing
from nanolearn.hardware import Machine, choose_dtype
from nanolearn.model import backends
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import DESCRIPTION, Tokenizer
from nanolearn.train import stall, trackers
from nanolearn.train.checkpoint import check_identity
from nanolearn.train.records import LAUNCHING, LOCK, only_writer

RECIPE, EXECUTION, DATA, TOKENIZER = "recipe.json", "execution.json", "data.json", "tokenizer"
PATIENCE = 1800.0  # seconds that training waits for a server that is gone; below what counts as a stall
TOKENISE_NOW = 100e6  # bytes of text up to which a corpus is tokenised before the first step


def refuse_unbuilt(execution: Execution) -> None:
    """Raises UserError for a wish whose package is missing, before anything is fetched.

    Taught in chapter 07_pretrain.

    >>> refuse_unbuilt(Execution())
    """
    trackers.check(execution.tracker)


def check_attention(recipe: Recipe, execution: Execution, machine: Machine) -> None:
    """Raises UserError for an attention backend that was asked for and that the machine can't have; tries nothing.

    >>> from nanolearn.hardware import cpu
    >>> check_attention(Recipe.from_depth(4), Execution(attention="sdpa"), cpu())

    Taught in chapter 05_attention.
    """
    if execution.attention != "auto":
        need = backends.need(recipe.gpt_config(), str(choose_dtype(machine, execution.dtype).value))
        backends.choose(machine, need, execution.attention, trying=False)


def check_nodes(execution: Execution) -> None:
    """Raises UserError for several nodes that have no place to meet. Taught in chapter 14_scaling_out.

    >>> check_nodes(Execution(nodes=2, rendezvous="node0:29500"))
    """
    host, colon, port = execution.rendezvous.rpartition(":")
    right = bool(host and colon) and port.isdigit() and 0 < int(port) < 65536
    if execution.rendezvous and not right:
        raise UserError(f"rendezvous={execution.rendezvous}", "give HOST:PORT of the first node, such as node0:29500")
    if execution.nodes > 1 and not right:
        raise UserError(
            f"nodes={execution.nodes} without a place to meet", "give rendezvous=HOST:29500 of the first node"
        )


@dataclass(frozen=True)
class Data:
    """The two token stores of a run, and what a resume knows them by. Taught in chapter 07_pretrain."""

    train: TokenStore
    val: TokenStore
    description: dict

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()


def open_data(source: Source, tokenizer: Tokenizer, disk_gb: float = 0.0) -> Data:
    """Fix the run's list of shards. A small corpus is tokenised now, by rank 0; the others find it done.

    `disk_gb` bounds the cache of the training split; validation always stays. Taught in chapter 07_pretrain.
    """
    stores = {
        "train": TokenStore(source, tokenizer, "train", disk_gb=disk_gb, patience=PATIENCE),
        "val": TokenStore(source, tokenizer, "val"),
    }
    size = source.size_hint("train")

    def prepare() -> None:
        stores["val"].prepare()
        if size is not None and size <= TOKENISE_NOW and not disk_gb:
            stores["train"].prepare()

    distributed.on_main(prepare)
    shards = {split: list(store.names) for split, store in stores.items()}
    return Data(**stores, description={"source": source.name, "digest_of_text": source.digest, "shards": shards})


def check_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Raises UserError if the folder holds a run of another recipe. Taught in chapter 07_pretrain."""
    path = run_dir / RECIPE
    if path.exists():
        check_identity(run_dir, {"recipe": Recipe.load(path).digest}, {"recipe": recipe.digest})


def write_settings(run_dir: Path, recipe: Recipe, execution: Execution) -> None:
    """Write recipe.json and execution.json: all that a worker needs to know. Taught in chapter 07_pretrain."""
    with replacing(run_dir / RECIPE) as path:
        recipe.save(path)
    with replacing(run_dir / EXECUTION) as path:
        execution.save(path)


def kept_tokenizer(run_dir: Path) -> Tokenizer | None:
    """The tokenizer that a run began with; None where none was written to its end, which is no run's loss."""
    folder = run_dir / TOKENIZER
    # This file is written last: without it a kill came in between, and no step was taken yet.
    return Tokenizer.load(folder) if (folder / DESCRIPTION).exists() else None


def claim(run_dir: Path, recipe: Recipe, execution: Execution, tokenizer: Tokenizer, data: Data) -> dict[str, str]:
    """Write what the run is, after comparing it with what is written; its identity for checkpoints.

    Raises UserError naming what differs (recipe, tokenizer or data), and for a tokenizer of another size than the
    recipe's vocabulary; then nothing has changed. Taught in chapter 07_pretrain.
    """
    if tokenizer.vocab_size != recipe.vocab_size:
        # On a GPU a token beyond the tables is a device-side assertion, long after this moment.
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens and the recipe {recipe.vocab_size:,}",
            f"give vocab_size={tokenizer.vocab_size}, or the tokenizer that the recipe means",
        )
    check_recipe(run_dir, recipe)
    mine = {"tokenizer": tokenizer.digest, "data": data.digest}
    theirs, file = dict(mine), run_dir / DATA
    if kept := kept_tokenizer(run_dir):
        theirs["tokenizer"] = kept.digest
    if file.exists():
        theirs["data"] = json.loads(file.read_text(encoding="utf-8")).get("digest")
    check_identity(run_dir, theirs, mine)
    write_settings(run_dir, recipe, execution)
    tokenizer.save(run_dir / TOKENIZER)
    with replacing(file) as path:
        path.write_text(json.dumps(data.description | {"digest": data.digest}, indent=1), encoding="utf-8")
    return mine | {"recipe": recipe.digest}


def check_alike(identity: dict[str, str]) -> None:
    """Raises UserError, on every rank, unless all ranks know the run by the same tokenizer, data and recipe.

    Nodes with caches of their own can hold different text under one name; together they would train on neither.
    Taught in chapter 14_scaling_out.

    >>> check_alike({"tokenizer": "1a2b", "data": "3c4d"})
    """
    for rank, theirs in enumerate(everyone := distributed.gather(identity)):
        if different := [name for name, digest in everyone[0].items() if theirs.get(name) != digest]:
            raise UserError(
                f"rank {rank} has another {different[0]} than rank 0",
                "give every node the same corpus: copy the first node's cache, or share it",
            )


def set_aside(run_dir: Path) -> Path | None:
    """Move a run directory out of the way, for a start from step 0; nothing is deleted. The new name, or None.

    Raises UserError for a folder that is no run's, and for one that can't be moved (a mount point); then nothing
    has changed. Taught in chapter 07_pretrain.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> folder.mkdir()
    >>> set_aside(folder).name
    'run.before-1'
    """
    run_dir = Path(run_dir)
    if not run_dir.exists():
        return None
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file", "give another run_dir")
    if {path.name for path in run_dir.iterdir()} - {LOCK, LAUNCHING, stall.FOLDER_NAME} and not (
        run_dir / RECIPE
    ).exists():
        raise UserError(f"{run_dir} is no run's folder ({RECIPE} is missing): it stays there", "give another run_dir")
    with only_writer(run_dir), only_writer(run_dir, LAUNCHING):
        pass  # nobody trains there
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.before-{number}")).exists():
        number += 1
    try:
        run_dir.rename(aside)
    except OSError as error:
        raise UserError(f"{run_dir} can't be moved aside ({error.strerror})", "give another run_dir") from None
    return aside
