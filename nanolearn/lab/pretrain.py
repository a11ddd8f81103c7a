"""What notebook 07 uses, so that its cells stay short: settling a run, preparing its data, and its report.

Nothing here trains. The notebook calls `nanolearn.train.launch.launch` itself, and every helper returns or prints
plain things that a reader can look at. No byte is fetched and nothing on disk is touched before the plan is accepted.
"""

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanolearn import hardware
from nanolearn.data.sources import open_source
from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine
from nanolearn.lab import bands, params, plots
from nanolearn.lab import curves as curves_of
from nanolearn.model.gpt import GPT
from nanolearn.model.materialize import materialize
from nanolearn.overrides import validated
from nanolearn.paths import runs_dir
from nanolearn.plan import Plan, make_plan
from nanolearn.presets import choose_data, choose_preset
from nanolearn.recipe import Recipe, build
from nanolearn.tokenizer import Tokenizer
from nanolearn.train import checkpoint, launch, records
from nanolearn.train.identity import (
    EXECUTION,
    RECIPE,
    TOKENISE_NOW,
    check_attention,
    check_nodes,
    open_data,
    refuse_unbuilt,
    set_aside,
)
from nanolearn.train.records import Result, finished
from nanolearn.train.viewer import held

PARAMETERS = ("depth", "preset", "data", "run_dir", "seed", "resume", "rehearsal", "overrides")
REHEARSED_LAYERS, REHEARSED_STEPS, REHEARSED_ROWS = 4, 2, 2
UNITS = (("hours", 3600, 7200), ("minutes", 60, 1200), ("seconds", 1, 0))  # name, seconds, from where on


@dataclass(frozen=True)
class Settled:
    """A run before it starts: what, how, on what, where, and why so. `done` is its result if it is complete;
    `watching`: another process trains it now.
    """

    recipe: Recipe
    execution: Execution
    machine: Machine
    plan: Plan
    folder: Path
    why: tuple[str, ...]
    begun: float
    fresh: bool
    done: Result | None
    watching: bool = False


def settle(*, begun: float, **settings: Any) -> Settled:
    """Turn the notebook's parameters into a run; prints nothing, fetches nothing, writes nothing.

    Where another process trains in the run's directory, the run is that one, whatever else is asked for. `begun` is
    the time.time() at which the notebook started; `settings` are PARAMETERS, all of them. Raises UserError for a
    parameter that is unknown or missing, and for values that make no run.

    Taught in chapter 07_pretrain.
    """
    for name in settings:
        if name not in PARAMETERS:
            raise params.unknown(name, PARAMETERS)
    if missing := [name for name in PARAMETERS if name not in settings]:
        raise UserError(f"parameter {missing[0]!r} is missing", "write it into the parameters cell again")
    return _settled(begun=begun, **settings)


def _settled(
    *,
    depth: int,
    preset: str,
    data: str,
    run_dir: str,
    seed: int,
    resume: bool,
    rehearsal: bool,
    overrides: str,
    begun: float,
) -> Settled:
    machine = hardware.detect()
    recipe, execution = build(depth, preset, data, seed, overrides, machine)
    refuse_unbuilt(execution)
    check_nodes(execution)
    check_attention(recipe, execution, hardware.select(machine, execution.device))
    size = choose_preset(hardware.select(machine, execution.device), preset)
    corpus = choose_data(recipe.preset, data)
    asked = "asked for" if corpus.value != recipe.data else corpus.reason  # an override may name the corpus too
    if rehearsal:
        recipe, execution = rehearse(recipe, execution, execution.world(hardware.select(machine, execution.device)))
    folder = _folder(run_dir, recipe, rehearsal)
    why = [f"preset {size.value}: {size.reason}", f"data {recipe.data}: {asked}"]
    if watching := held(folder):
        # Who names a live run's directory wants to see that run, and need not know what it was started with.
        recipe, execution = Recipe.load(folder / RECIPE), Execution.load(folder / EXECUTION)
        why = ["another process trains in the run directory: recipe and execution are its own, and it is only watched"]
    return Settled(
        recipe=recipe,
        execution=execution,
        machine=machine,
        plan=_plan(recipe, execution, machine, _saved_step(folder) if resume or watching else 0, watching),
        folder=folder,
        why=tuple(why),
        begun=begun,
        fresh=not resume,
        done=finished(folder, recipe.digest) if resume else None,
        watching=watching,
    )


def _plan(recipe: Recipe, execution: Execution, machine: Machine, done_steps: int, watching: bool) -> Plan:
    if watching:  # perhaps from a machine without its devices
        execution = execution.model_copy(update={"device": "auto", "num_devices": 1, "nodes": 1, "micro_batch": 0})
    return make_plan(recipe, execution, machine, done_steps=done_steps)


def _saved_step(folder: Path) -> int:
    saved = records.read(folder, "checkpoint")
    return saved[-1]["step"] if saved else 0


def _folder(run_dir: str, recipe: Recipe, rehearsal: bool) -> Path:
    if run_dir:
        return Path(run_dir).expanduser().resolve()
    return runs_dir() / (f"rehearsal-{recipe.name}" if rehearsal else recipe.name)


def rehearse(recipe: Recipe, execution: Execution, devices: int) -> tuple[Recipe, Execution]:
    """The shortest walk along a run's whole path: full width, vocabulary and row length, few layers, two steps.

    >>> full = Recipe.from_depth(24)
    >>> short, _ = rehearse(full, Execution(), devices=1)
    >>> short.n_embd == full.n_embd, short.n_layer, short.steps, short.rows_per_step
    (True, 4, 2, 1)
    """
    changed = {
        "n_layer": min(recipe.depth, REHEARSED_LAYERS),
        "steps": REHEARSED_STEPS,
        "batch_tokens": recipe.sequence_len * devices,
        "warmup": 1,
        "momentum_ramp": 0,
    }
    rows = {"micro_batch": 1, "val_tokens": REHEARSED_ROWS * recipe.sequence_len, "save_every": REHEARSED_STEPS}
    return validated(Recipe, recipe.model_dump() | changed), execution.model_copy(update=rows)


def accept(run: Settled) -> None:
    """Print the plan and the reasons behind it. Raises UserError if it is refused; a run that is complete, or another
    process's, is past that.
    """
    place = [*run.why, f"run directory: {run.folder}"]
    print("\n".join(place if run.watching else [*place, "", run.plan.text()]))
    if run.done is not None:
        print("\nThis run is complete: nothing will be trained, and what follows is its report.")
    elif not run.watching:
        run.plan.check()


def prepare(run: Settled) -> None:
    """Make the data ready as far as a notebook should, and say what it is.

    A corpus below 100 MB is fetched, its tokenizer trained, and all of it tokenised. Of a larger one only the list
    of files is asked for: its shards are fetched while the run goes. Raises UserError when it can't be had.

    Taught in chapter 07_pretrain.
    """
    if run.fresh and (aside := set_aside(run.folder)):
        print(f"resume=False: what was in {run.folder} is now in {aside}")
    source = open_source(run.recipe.data)
    print(f"{source.note}.")
    if run.done is not None or run.watching:
        return
    size = source.size_hint("train")
    if size is None or size > TOKENISE_NOW or run.machine.simulated:
        print(f"{len(source.shards('train')):,} training shards are listed; they are fetched while the run goes")
        return
    _, tokenizer = launch.prepare(run.recipe, run.folder)
    data = open_data(source, tokenizer)
    for split, store in (("training", data.train), ("validation", data.val)):
        shards = [store.shard(index) for index in range(store.n_shards)]
        tokens, text = sum(len(shard.flat) for shard in shards), sum(shard.text_bytes for shard in shards)
        documents = sum(shard.n_documents for shard in shards)
        print(f"{split}: {documents:,} documents, {tokens:,} tokens of {text / tokens:.2f} bytes each")


def behind(run: Settled) -> bands.Bands:
    """What stands behind the live curve: earlier runs of the same depth, and where published ones ended."""
    return bands.bands(run.recipe, run.folder, runs_dir())


def curves(run: Settled, guess: float) -> None:
    """Show loss and bits per byte of the whole run, with where it began and what was guessed."""
    points = curves_of.Curves(records.read(run.folder))
    fig, axes = plots.figure(2, height=2.8)
    points.draw(*axes)
    untrained = math.log(run.recipe.vocab_size)
    axes[0].axhline(untrained, color=plots.GREY, linestyle=":", label=f"ln V = {untrained:.2f}, no knowledge")
    axes[1].axhline(guess, color=plots.GREY, linestyle="--", label=f"your guess, {guess:.2f}")
    curves_of.name_axes(*axes)
    for part in axes:
        part.legend(loc="best")
    first, last = points.loss[0][2], points.loss[-1][2]
    measured = ", ".join(f"{bits:.2f}" for _, _, bits in points.bits + points.final) or "not measured"
    plots.show(
        fig,
        caption=f"The loss begins at {first:.2f} and ends at {last:.2f} nats per token. "
        "Validation text is never trained on; bits per byte can be compared between tokenizers. Points are measured on "
        "a small part of it, the star on more, so the star may lie beside the curve.",
        alt=f"Left: training loss against tokens seen, falling from {first:.2f} to {last:.2f}. Right: bits per byte "
        f"on validation text, {measured}.",
    )


def seconds(result: Result) -> dict[str, float]:
    """Draw where the time of a run went, over all its parts, and return the shares (they add up to 1)."""
    spent = dict(sorted(result.seconds.items(), key=lambda item: item[1]))
    total = sum(spent.values())
    unit, size = next((name, size) for name, size, least in UNITS if total >= least)
    fig, (axes,) = plots.figure(height=0.32 * len(spent) + 0.9)
    bars = axes.barh(list(spent), [value / size for value in spent.values()], color=plots.BLUE)
    axes.bar_label(bars, [f"{value / size:,.1f}  ({value / total:.1%})" for value in spent.values()], padding=4)
    axes.set_xlim(0, 1.3 * max(spent.values()) / size)
    axes.grid(visible=False, axis="y")
    plots.label(axes, "Where each second went", unit, "")
    first = "" if result.first_step_seconds is None else f", which ended after {result.first_step_seconds:.1f} s"
    named = ", ".join(f"{name} {value / total:.1%}" for name, value in reversed(spent.items()))
    plots.show(
        fig,
        caption=f"{total / size:,.1f} {unit} in all. The start is everything before the first step{first}. "
        "Records include drawing the live curve.",
        alt=f"Bars of {unit} by activity: {named}.",
    )
    return {name: value / total for name, value in spent.items()}


def samples(run: Settled, prompt: str, width: int = 100) -> None:
    """Print how the continuation of one prompt changed while the model learned."""
    for record in records.read(run.folder, "sample"):
        if record["prompt"] == prompt:
            text = " ".join(record["text"].split())
            print(textwrap.fill(f"step {record['step']:>6,}: {prompt} | {text}", width, subsequent_indent=" " * 13))


def load(run: Settled) -> tuple[GPT, Tokenizer]:
    """The model of the newest checkpoint, verified, in a fresh model; and its tokenizer.

    It lies on the run's device, or on the CPU where several devices were used: their memory is the workers'.

    Taught in chapter 07_pretrain.
    """
    found = checkpoint.newest(run.folder)
    if found is None:
        raise UserError(f"{run.folder} has no checkpoint", "let the run come to its first one")
    alone = run.plan.world == 1 and not run.watching
    device = hardware.torch_device(run.plan.machine) if alone else torch.device("cpu")
    dtype = getattr(torch, str(run.plan.dtype.value)) if alone else torch.float32
    model = materialize(run.recipe.gpt_config(), device, run.recipe.seed, dtype)
    model.load_state_dict(checkpoint.load_weights(found.path))
    return model, Tokenizer.load(run.folder / "tokenizer")


def files(run: Settled) -> None:
    """Print what lies in the run directory, with sizes."""
    for path in sorted(path for path in run.folder.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:>14,} bytes  {path.relative_to(run.folder).as_posix()}")
