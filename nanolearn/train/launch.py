"""Starting a run: in this process where one device is used, in processes of torchrun's where there are several.

A notebook never holds an accelerator that its workers need: it writes recipe and execution into the run
directory, starts workers that need nothing else (`python -m nanolearn.train.launch RUN_DIR`), and follows
their records (nanolearn.train.follow).
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.errors import record

from nanolearn import distributed
from nanolearn.data.sources import Source, open_source, texts
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.fetch import locked
from nanolearn.hardware import Machine, detect, select
from nanolearn.paths import cache_dir
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.tokenizer import train as train_tokenizer
from nanolearn.train.agent import die_with_starter
from nanolearn.train.console import Console
from nanolearn.train.follow import follow
from nanolearn.train.identity import (
    check_attention,
    check_nodes,
    check_recipe,
    kept_tokenizer,
    refuse_unbuilt,
    write_settings,
)
from nanolearn.train.outcome import note
from nanolearn.train.records import LAUNCHING, Observer, Result, finished, only_writer
from nanolearn.train.trainer import train
from nanolearn.train.viewer import held, watch

JOINING = 3600  # seconds that the nodes wait for each other
TOKENIZER_BYTES = 2_000_000_000  # of text: merges of a larger sample are the same but for the rarest


class SimulatedLaunch(UserError):
    """All is ready, but the devices are only simulated; the message holds the command that would start the run.

    Taught in chapter 07_pretrain.
    """


def launch(
    recipe: Recipe,
    execution: Execution,
    run_dir: Path,
    *,
    machine: Machine,
    observers: Sequence[Observer] = (),
    begun: float | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """Run a recipe on a machine: prepare corpus and tokenizer, train or take up, return the result.

    One device: in this process. Several: torchrun on this host, followed from here; `observers` see every
    record either way. A run that another process trains is only watched. Raises SimulatedLaunch at the moment
    of launch on a simulated machine, UserError when the devices aren't there or a worker says so, Stalled when a
    rank came to no end. Taught in chapter 07_pretrain.
    """
    refuse_unbuilt(execution)  # before anything is fetched, also where devices are only simulated
    check_nodes(execution)
    run_dir = Path(run_dir).resolve()
    machine = select(machine, execution.device)
    check_attention(recipe, execution, machine)
    if done := finished(run_dir, recipe.digest):
        return done
    if held(run_dir):
        check_recipe(run_dir, recipe)
        note(run_dir)
        return watch(run_dir, observers, say)
    note(run_dir)
    # Minutes may pass until the workers hold the run's own lock: text is fetched, a tokenizer trained.
    with only_writer(run_dir, LAUNCHING):
        with only_writer(run_dir):
            check_recipe(run_dir, recipe)
            write_settings(run_dir, recipe, execution)
        return _started(recipe, execution, run_dir, machine, observers, begun, say)


def _started(
    recipe: Recipe,
    execution: Execution,
    run_dir: Path,
    machine: Machine,
    observers: Sequence[Observer],
    begun: float | None,
    say: Callable[[str], None],
) -> Result:
    count, alone = execution.local_world(machine), execution.world(machine) == 1
    command = torchrun(run_dir, count, rendezvous(recipe, execution, host=True))
    if machine.simulated:
        raise SimulatedLaunch(
            f"simulated {machine.label.removesuffix(' (simulated)')}: everything up to the launch was done",
            "would start in this process" if alone else f"would start {' '.join(command)}",
        )
    source, tokenizer = prepare(recipe, run_dir, say)
    if not alone:
        return follow(command, count, run_dir, observers)
    settings: Any = {"machine": machine, "source": source, "tokenizer": tokenizer}
    return train(recipe, execution, run_dir, **settings, observers=observers, begun=begun)


def torchrun(run_dir: Path, count: int, meeting: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command that starts this node's workers. Taught in chapter 07_pretrain.

    >>> torchrun(Path("runs/a"), 8)[1:]
    ['-m', 'nanolearn.train.agent', '--standalone', '--nproc-per-node=8', '-m', 'nanolearn.train.launch', 'runs/a']
    """
    launcher = [sys.executable, "-m", "nanolearn.train.agent", *meeting, f"--nproc-per-node={count}"]
    return [*launcher, "-m", "nanolearn.train.launch", str(run_dir)]


def rendezvous(recipe: Recipe, execution: Execution, host: bool) -> tuple[str, ...]:
    """Where the nodes of a run meet, as torchrun's options; `host`: on the node that the address belongs to.

    >>> rendezvous(Recipe.from_depth(4), Execution(), host=True)
    ('--standalone',)

    Taught in chapter 14_scaling_out.
    """
    if execution.nodes == 1:
        return ("--standalone",)
    return (
        f"--nnodes={execution.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={execution.rendezvous}",
        f"--rdzv-id={recipe.digest[:16]}",
        # Said, not guessed from the host's names: an alias is no name that a host knows itself by.
        f"--rdzv-conf=is_host={int(host)},join_timeout={JOINING}",
    )


def prepare(
    recipe: Recipe, run_dir: Path | None = None, say: Callable[[str], None] = print
) -> tuple[Source, Tokenizer]:
    """The recipe's corpus and tokenizer. A run keeps the tokenizer it began with; a new one takes it from the cache,
    or trains it on the training split, once for a corpus and a size.

    Raises UserError when the corpus can't be had or is too small for the vocabulary. Taught in chapter 07_pretrain.
    """
    source = open_source(recipe.data)
    if run_dir is not None and (kept := kept_tokenizer(run_dir)):
        return source, kept
    place = cache_dir() / "tokenizers" / f"{source.name}-{recipe.vocab_size}"
    with locked(place):
        if not place.exists():
            say(f"training a tokenizer of {recipe.vocab_size:,} on {source.name}")
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            beside.mkdir(parents=True, exist_ok=True)
            train_tokenizer(texts(source, "train", TOKENIZER_BYTES), recipe.vocab_size).save(beside)
            beside.rename(place)
    return source, Tokenizer.load(place)


@record
def main() -> None:
    """One worker: everything it needs lies in the run directory that is its only argument.

    Taught in chapter 07_pretrain.
    """
    die_with_starter(signal.SIGKILL)
    run_dir = Path(sys.argv[1]).resolve()
    recipe, execution = Recipe.load(run_dir / "recipe.json"), Execution.load(run_dir / "execution.json")
    main_rank = distributed.from_environment().main
    source, tokenizer = prepare(recipe, run_dir)
    train(
        recipe,
        execution,
        run_dir,
        machine=detect(),
        source=source,
        tokenizer=tokenizer,
        observers=(Console(recipe.steps),) if main_rank else (),
        begun=psutil.Process().create_time(),
    )
    distributed.stop()


if __name__ == "__main__":
    main()
