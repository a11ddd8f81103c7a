"""Packing and loading on one core: documents a second for every packer, tokens a second of finished batches.

Two kinds of text: web text at T = 2048 (lognormal lengths of mean 783, 35% of the tokens in
documents longer than a row) and the embedded corpus under a vocabulary of 4,096 at T = 256. Packing includes
writing the plan to disk; the floor is 300,000 documents a second for the default packer. Loading gives int64
batches on the CPU; the floor is 20 times what a trainer consumes (about 5,000 tokens a second here, 125,000
on one of eight GPUs). The best of several rounds counts: a neighbour's burst only ever makes a round slower;
for a busy machine, seconds of the core itself are told beside the wall's.
`python bench/data.py` takes about a minute.
"""

import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import record

from nanolearn.data.loader import Loader
from nanolearn.data.packing import PACKERS, Plan, pack
from nanolearn.data.shard import TokenShard
from nanolearn.data.sources import open_source, texts
from nanolearn.data.tokens import TokenStore
from nanolearn.tokenizer import train

DOCUMENTS, VOCABULARY, ROUNDS = 200_000, 4096, 10
FLOOR_DOCUMENTS, FLOOR_TOKENS = 300_000, 20 * 125_000


def best_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """The fastest of some rounds, by the clock on the wall and in seconds of the core itself."""
    walls, cores = [], []
    for _ in range(rounds):
        wall, core = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cores.append(time.process_time() - core)
    return min(walls), min(cores)


def web_lengths() -> np.ndarray:
    """Tokens of each document, without BOS."""
    sigma = 1.0545
    sizes = np.random.default_rng(0).lognormal(np.log(783) - sigma**2 / 2, sigma, DOCUMENTS)
    return np.maximum(1, sizes - 1).astype(np.int64)


def save(plan: Plan, folder: Path) -> None:
    """Write a plan's four arrays."""
    for name in ("row_start", "doc", "start", "length"):
        np.save(folder / name, getattr(plan, name))


def measure_packing(lengths: np.ndarray, capacity: int) -> dict:
    """Every packer on one shard's lengths, plan written included."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for packer in PACKERS:
            plan = pack(lengths, capacity, packer)
            wall, core = best_seconds(lambda packer=packer: save(pack(lengths, capacity, packer), Path(folder)))
            figures[packer] = {
                "documents_per_second": round(len(lengths) / wall),
                "documents_per_core_second": round(len(lengths) / core),
                "rows_per_second": round(plan.n_rows / wall),
                "utilisation": round(plan.utilisation, 5),
                "loss": round(plan.loss, 4),
                "continuations_per_row": round(plan.continuations / plan.n_rows, 3),
                "rows_that_begin_inside_a_document": round(plan.continued_rows / plan.n_rows, 3),
            }
    return figures


def measure_loading(store, sequence_len: int, micro_batch: int, batches: int) -> dict:
    """One rank's batches from a cold start (the plan is computed) and once the plan is there."""
    began = time.perf_counter()
    loader = Loader(store, bos=0, sequence_len=sequence_len, packer="best_fit_tail", seed=0)
    stream = loader.micro_batches(0, micro_batch, micro_batch)
    next(stream)
    first = time.perf_counter() - began
    wall, core = best_seconds(lambda: [next(stream) for _ in range(batches)])
    return {
        "first_batch_seconds": round(first, 3),
        "tokens_per_second": round(batches * micro_batch * sequence_len / wall),
        "tokens_per_core_second": round(batches * micro_batch * sequence_len / core),
    }


def in_memory(lengths: np.ndarray) -> SimpleNamespace:
    """A store of one shard with these lengths and any tokens: what is read from the page cache."""
    offsets = np.append(0, np.cumsum(lengths))
    flat = np.random.default_rng(0).integers(0, 1 << 15, int(offsets[-1]), dtype=np.uint16)
    shard = TokenShard(Path(), flat, offsets, 0, 0)
    ignore = {name: lambda *given: None for name in ("ahead", "rows", "keep_rows")}
    return SimpleNamespace(n_shards=1, shard=lambda index: shard, **ignore)


def main() -> None:
    about = record.machine() | {name: version(name) for name in ("numpy", "pyarrow")}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    source = open_source("embedded")
    tokenizer = train(texts(source), VOCABULARY)
    store = TokenStore(source, tokenizer, "train")
    store.prepare()
    web, own = web_lengths(), np.concatenate([store.shard(i).lengths for i in range(store.n_shards)])
    figures = {
        "floors": {"documents_per_second": FLOOR_DOCUMENTS, "tokens_per_second": FLOOR_TOKENS},
        "packing": {
            f"web text, {len(web):,} documents, T = 2048": measure_packing(web, 2049),
            f"embedded corpus, {len(own):,} documents, T = 256": measure_packing(own, 257),
        },
        "loading": {
            "web text, 32 x 2048": measure_loading(in_memory(web[:50_000]), 2048, 32, batches=50),
            "embedded corpus, 8 x 256": measure_loading(store, 256, 8, batches=500),
        },
    }
    record.write("data", "python bench/data.py", figures, about)


if __name__ == "__main__":
    main()
