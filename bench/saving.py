"""What a save costs a run: how long training stands still, against a save that is waited for.

Two states: that of a real model of depth 4 (weights, Muon's and AdamW's moments), and 300 MB of large matrices. For
each: the stall of the first save (the host's buffers are touched for the first time) and of later ones, a blocking
save, where its seconds go (write with sync, read back and hash), and how late a thread that wakes every millisecond
comes to be woken while a save is in flight: a save that holds Python's lock would stop training again. Then what a
resume costs: checking every byte, and reading it. The best of three rounds counts: a neighbour's burst only makes one
slower. Tensors lie on a GPU if there is one; without, the copy is one inside the memory, and a copy from a GPU is not
measured.
`python bench/saving.py` takes about a minute.
"""

import tempfile
import time
from pathlib import Path

import record
import torch

from nanolearn.model.materialize import materialize
from nanolearn.optim.optimizer import Optimizer
from nanolearn.recipe import Recipe
from nanolearn.train import checkpoint, writing
from nanolearn.train.checkpoint import MODEL, OPTIMIZER, Manifest
from nanolearn.train.saving import Saver

SAVES = 3


def depth_4(device: str) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the default recipe at depth 4."""
    recipe = Recipe.from_depth(4)
    model = materialize(recipe.gpt_config(), device, recipe.seed, torch.float32)
    optimizer = Optimizer(model, recipe.rates())
    found = {MODEL + name: tensor for name, tensor in optimizer.weights().items()}
    return found | {OPTIMIZER + name: tensor for name, tensor in optimizer.state_dict().items()}


def large(device: str) -> dict[str, torch.Tensor]:
    """300 MB: a weight and two moments of each of 8 matrices."""
    names = [f"{i}.weight" for i in range(8)]
    kinds = [MODEL + "{}", OPTIMIZER + "{}.exp_avg", OPTIMIZER + "{}.exp_avg_sq"]
    return {kind.format(name): torch.randn(1024, 3052, device=device) for name in names for kind in kinds}


def manifest(step: int) -> Manifest:
    """What a save needs to be told."""
    return Manifest(step=step, row=0, tokens=0, ranks=1, identity={}, watch={}, seconds={})


def timed(parts: dict[str, list[float]], name: str) -> None:
    """Let a part of a save note its seconds."""
    work = getattr(writing, name)

    def noting(*arguments):
        begun = time.perf_counter()
        result = work(*arguments)
        parts.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    setattr(writing, name, noting)


def longest_pause(saver: Saver) -> float:
    """Beyond the millisecond that this thread asks for each time, until the save in flight ends."""
    worst = 0.0
    while saver.thread is not None and saver.thread.is_alive():
        begun = time.perf_counter()
        time.sleep(0.001)
        worst = max(worst, time.perf_counter() - begun - 0.001)
    return worst


def measure(tensors: dict[str, torch.Tensor], parts: dict[str, list[float]]) -> dict:
    """One state, saved several times each way."""
    stalls, seconds, pauses, blocking = [], [], [], []
    parts.clear()
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), tensors)
        for step in range(1, SAVES + 1):
            begun = time.perf_counter()
            saver.start(tensors, manifest(step))
            stalls.append(time.perf_counter() - begun)
            pauses.append(longest_pause(saver))
            (saved,) = saver.wait()
            seconds.append(saved.seconds)
        size = saved.found.manifest.bytes
        parts.clear()
        for step in range(SAVES + 1, 2 * SAVES + 1):
            begun = time.perf_counter()
            writing.save(Path(folder), tensors, manifest(step))
            blocking.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        found = checkpoint.newest(Path(folder))
        checked = time.perf_counter() - begun
        checkpoint.load(found, tensors)
        loaded = time.perf_counter() - begun - checked
    later = min(stalls[1:])
    return {
        "megabytes": round(size / 1e6, 1),
        "stall_first_seconds": round(stalls[0], 4),
        "stall_seconds": round(later, 4),
        "blocking_seconds": round(min(blocking), 3),
        "stall_share_of_blocking": round(later / min(blocking), 4),
        "copy_gb_per_second": round(size / later / 1e9, 2),
        "write_and_sync_seconds": round(min(parts["_write"]), 3),
        "read_back_and_hash_seconds": round(min(parts["_entries"]), 3),
        "background_seconds": round(min(seconds), 3),
        "resume_check_seconds": round(checked, 3),
        "resume_read_seconds": round(loaded, 3),
        "longest_pause_seconds": round(min(pauses), 4),
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about, parts = record.machine() | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}, {}
    timed(parts, "_write")
    timed(parts, "_entries")
    figures = {"depth 4": measure(depth_4(device), parts), "300 MB in 24 matrices": measure(large(device), parts)}
    record.write("saving", "python bench/saving.py", figures, about)


if __name__ == "__main__":
    main()
