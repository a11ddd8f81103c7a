"""How the laptop preset was searched: short real runs, each a line of overrides, judged at equal processor time.

A trial fixes what it changes; its number of steps is set so that training alone takes the budget, from the speed of a
few steps measured first. Everything else is the trainer's own path: corpus, packing, schedule, validation on the whole
split. `python bench/preset.py SECONDS "n_embd=192" "n_embd=192 batch_tokens=4096" ...` appends each trial to
bench/results/preset.jsonl as it ends. Two threads; leave the machine alone meanwhile, for a busy one gives a trial
fewer steps.
"""

import json
import sys
import tempfile
from pathlib import Path

import record

from nanolearn import hardware
from nanolearn.recipe import Recipe, build
from nanolearn.train.launch import launch

PROBE_STEPS = 12


def run(overrides: str, steps: int, val_tokens: int) -> tuple[Recipe, object]:
    """One run in a folder of its own, deleted afterwards."""
    machine = hardware.detect()
    rest = f"steps={steps} val_tokens={val_tokens} val_every={steps} sample_every={steps} save_every={steps}"
    recipe, execution = build(4, "laptop", "embedded", 0, f"{overrides} {rest}", machine)
    with tempfile.TemporaryDirectory() as folder:
        return recipe, launch(recipe, execution, Path(folder) / "run", machine=machine, say=lambda line: None)


def learning(result) -> float:
    return sum(result.seconds.get(name, 0.0) for name in ("forward and backward", "optimizer", "waiting for data"))


def trial(overrides: str, seconds: float) -> dict:
    """Measure a step, then train for as many as fit."""
    _, probe = run(overrides, PROBE_STEPS, 0)
    steps = max(20, round(seconds / (learning(probe) / PROBE_STEPS)))
    recipe, result = run(overrides, steps, -1)
    return {
        "overrides": overrides,
        "seconds": round(learning(result), 1),
        "steps": steps,
        "tokens": recipe.tokens,
        "tokens_per_second": round(recipe.tokens / learning(result)),
        "bits_per_byte": round(result.bpb, 4),
    }


def main() -> None:
    seconds, *trials = sys.argv[1:]
    record.RESULTS.mkdir(exist_ok=True)
    for overrides in trials:
        about = record.machine()
        line = {"date": record.today(), "budget": float(seconds), **trial(overrides, float(seconds)), "machine": about}
        with (record.RESULTS / "preset.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line | {"machine": about["load_before"]}), flush=True)


if __name__ == "__main__":
    main()
