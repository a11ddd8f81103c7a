"""Starting a run: in this process where one device is used, in processes of torchrun's where there are several.

A notebook never holds an accelerator that its workers need: it writes recipe and execution into the run
directory, starts workers that need nothing else (`python -m nanolearn.train.launch RUN_DIR`), and follows
their records. What the workers print goes to workers.log, where the first traceback is looked for if one of
them fails.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing.errors import record

from nanolearn import distributed
from nanolearn.data.sources import Source, open_source, texts
from nanolearn.errors import UserError
from nanolearn.fetch import locked
from nanolearn.hardware import Machine, detect, select
from nanolearn.paths import cache_dir
from nanolearn.recipe import Execution, Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.tokenizer import train as train_tokenizer
from nanolearn.train.records import RESULT, Console, Observer, Result, finished, only_writer, read_from
from nanolearn.train.trainer import check_recipe, train, write_settings

LOG = "workers.log"
TOKENIZER_BYTES = 2_000_000_000  # of text: merges of a larger sample are the same but for the rarest
POLL = 0.25  # seconds between two looks at the workers' records


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
    record either way. Raises SimulatedLaunch at the moment of launch on a simulated machine, UserError when
    the devices aren't there or a worker says so. Taught in chapter 07_pretrain.
    """
    run_dir = Path(run_dir).resolve()
    machine = select(machine, execution.device)
    count = execution.world(machine)
    if done := finished(run_dir, recipe.digest):
        return done
    with only_writer(run_dir):
        check_recipe(run_dir, recipe)
        write_settings(run_dir, recipe, execution)
    command = torchrun(run_dir, count)
    if machine.simulated:
        raise SimulatedLaunch(
            f"simulated {machine.label.removesuffix(' (simulated)')}: everything up to the launch was done",
            f"would start {' '.join(command)}",
        )
    source, tokenizer = prepare(recipe, run_dir, say)
    if count == 1:
        return train(
            recipe,
            execution,
            run_dir,
            machine=machine,
            source=source,
            tokenizer=tokenizer,
            observers=observers,
            begun=begun,
        )
    return _follow(command, count, run_dir, observers)


def torchrun(run_dir: Path, count: int) -> list[str]:
    """The command that starts the workers. Taught in chapter 07_pretrain.

    >>> torchrun(Path("runs/a"), 8)[1:]
    ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=8', '-m', 'nanolearn.train.launch', 'runs/a']
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [*launcher, "-m", "nanolearn.train.launch", str(run_dir)]


def prepare(
    recipe: Recipe, run_dir: Path | None = None, say: Callable[[str], None] = print
) -> tuple[Source, Tokenizer]:
    """The recipe's corpus and tokenizer. A run keeps the tokenizer it began with; a new one takes it from the cache,
    or trains it on the training split, once for a corpus and a size.

    Raises UserError when the corpus can't be had or is too small for the vocabulary. Taught in chapter 07_pretrain.
    """
    source = open_source(recipe.data)
    if run_dir is not None and (run_dir / "tokenizer").exists():
        return source, Tokenizer.load(run_dir / "tokenizer")
    place = cache_dir() / "tokenizers" / f"{source.name}-{recipe.vocab_size}"
    with locked(place):
        if not place.exists():
            say(f"training a tokenizer of {recipe.vocab_size:,} on {source.name}")
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            beside.mkdir(parents=True, exist_ok=True)
            train_tokenizer(texts(source, "train", TOKENIZER_BYTES), recipe.vocab_size).save(beside)
            beside.rename(place)
    return source, Tokenizer.load(place)


def set_aside(run_dir: Path) -> Path | None:
    """Move a run directory out of the way, for a start from step 0; nothing is deleted. The new name, or None.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> folder.mkdir()
    >>> set_aside(folder).name
    'run.before-1'
    """
    run_dir = Path(run_dir)
    if not run_dir.exists():
        return None
    with only_writer(run_dir):
        pass  # nobody trains there
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.before-{number}")).exists():
        number += 1
    run_dir.rename(aside)
    return aside


def _follow(command: list[str], count: int, run_dir: Path, observers: Sequence[Observer]) -> Result:
    # Without it torchrun gives each process one thread.
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    (run_dir / RESULT).unlink(missing_ok=True)  # of a part of the run that was stopped
    _, offset = read_from(run_dir)
    with (run_dir / LOG).open("wb") as log:
        workers = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while workers.poll() is None:
                time.sleep(POLL)
                offset = _pass_on(run_dir, offset, observers)
        except KeyboardInterrupt:
            workers.send_signal(signal.SIGTERM)  # torchrun hands it on; the workers save and stop
            workers.wait()
        finally:
            if workers.poll() is None:
                workers.terminate()
                workers.wait()
    _pass_on(run_dir, offset, observers)
    if (run_dir / RESULT).exists():
        return Result.model_validate_json((run_dir / RESULT).read_text(encoding="utf-8"))
    raise _failure(run_dir / LOG)


def _pass_on(run_dir: Path, offset: int, observers: Sequence[Observer]) -> int:
    found, offset = read_from(run_dir, offset)
    for record_ in found:
        for observer in observers:
            observer(record_)
    return offset


def _failure(log: Path) -> Exception:
    """What the first worker that failed said: its own line, or its own traceback."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if said := re.search(r"UserError: (.+)", text):
        return UserError(said[1])
    start = text.find("Traceback (most recent call last)")
    return RuntimeError(f"a worker failed, see {log}:\n{text[start:][:4000] if start >= 0 else text[-2000:]}")


@record
def main() -> None:
    """One worker: everything it needs lies in the run directory that is its only argument.

    Taught in chapter 07_pretrain.
    """
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
