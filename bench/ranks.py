"""One process against two and four: tokens a second, and the optimizer state that each rank holds.

The laptop preset's run for a few steps in one process and in two gloo processes on the same cores: two can't be
faster here, the figure is what the exchange of gradients and weights costs. State bytes are those of each rank's
optimizer, counted from its tensors, beside an equal share. What a resume costs is in bench/saving.py.
`python bench/ranks.py` takes two minutes.
"""

import os
import socket
import statistics
import tempfile
from pathlib import Path

import record
import torch
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor

from nanolearn import distributed
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.model.materialize import materialize
from nanolearn.optim.optimizer import Optimizer
from nanolearn.recipe import Recipe
from nanolearn.train import launch
from nanolearn.train.records import read

STEPS, WARM = 40, 8


def run(folder: Path, processes: int, steps: int) -> list[dict]:
    """The laptop preset at a shorter horizon; the records of its steps."""
    recipe = Recipe.from_depth(4, "laptop", steps=steps)
    execution = Execution(device="cpu", num_devices=processes, val_tokens=0, save_every=STEPS, sample_every=steps)
    launch.launch(recipe, execution, folder, machine=cpu(), say=lambda text: None)
    return read(folder, "step")


def speed(folder: Path, processes: int) -> dict:
    """Tokens a second, median over the steps after the first ones."""
    steps = run(folder, processes, STEPS)[WARM:]
    return {
        "tokens_per_second": round(statistics.median(step["tokens_per_second"] for step in steps)),
        "loss_at_the_end": round(steps[-1]["loss"], 4),
    }


def _state(rank: int, world: int, port: int, folder: str) -> None:
    if world > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    distributed.start("cpu")
    recipe = Recipe.from_depth(4, "laptop")
    model = materialize(recipe.gpt_config(), torch.device("cpu"), 0, torch.float32)
    tensors = Optimizer(model, recipe.rates()).state_dict().values()
    held = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    (Path(folder) / f"{world}-{rank}").write_text(str(held))
    distributed.stop()


def state_bytes(folder: Path, world: int) -> dict:
    """What each rank's optimizer holds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_state, (world, port, str(folder)), nprocs=world)
    held = [int((folder / f"{world}-{rank}").read_text()) for rank in range(world)]
    return {"bytes_of_each_rank": held, "largest_times_ranks_over_whole": round(max(held) * world / sum(held), 3)}


def main() -> None:
    about = record.machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            "training": {f"processes: {count}": speed(folder / f"run-{count}", count) for count in (1, 2)},
            "state": {f"ranks: {count}": state_bytes(folder, count) for count in (1, 2, 4)},
        }
    record.write("ranks", "python bench/ranks.py", figures, about)


if __name__ == "__main__":
    main()
