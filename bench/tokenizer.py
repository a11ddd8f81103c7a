"""Tokenising speed against tiktoken's own `encode_ordinary_batch`, on the same cores, texts, ranks and pattern.

The two take turns, and the ratio is the median over rounds of neighbouring runs, so that a busy neighbour hurts both
alike. The floor is 0.8: cleaning, cutting of long runs and arrays instead of lists must not cost more than a fifth.
Also: seconds to train the vocabulary, and bytes a token. `python bench/tokenizer.py` takes about a minute.
"""

import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import record
import tiktoken

from nanolearn.data.sources import open_source, texts
from nanolearn.tokenizer import Tokenizer, train

VOCABULARY, ROUNDS, FLOOR = 4096, 3, 0.8


def seconds(work: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def compare(tokenizer: Tokenizer, corpus: list[str], threads: int) -> dict[str, float]:
    """Megabytes a second of both, and how many times tiktoken's speed ours is."""
    plain = tiktoken.Encoding(
        "plain",
        pat_str=tokenizer.pattern,
        mergeable_ranks={token: rank for rank, token in enumerate(tokenizer.ranks)},
        special_tokens=tokenizer.special,
    )
    ours, theirs = [], []
    for turn in range(ROUNDS):
        jobs = [
            (ours, lambda: tokenizer.encode_batch(corpus, threads)),
            (theirs, lambda: plain.encode_ordinary_batch(corpus, num_threads=threads)),
        ]
        outputs = []
        for times, job in jobs if turn % 2 else jobs[::-1]:
            took, output = seconds(job)
            times.append(took)
            outputs.append(output)
        assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True)), "the two must give the same tokens"
    size = sum(len(text.encode()) for text in corpus) / 1e6
    return {
        "nanolearn_mb_per_second": round(size / statistics.median(ours), 2),
        "tiktoken_mb_per_second": round(size / statistics.median(theirs), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 2),
    }


def main() -> None:
    about = record.machine() | {name: version(name) for name in ("tiktoken", "rustbpe")}
    corpus = list(texts(open_source("embedded")))
    training, tokenizer = seconds(lambda: train(corpus, VOCABULARY))
    cores = os.cpu_count() or 1
    figures = {
        "corpus_mb": round(sum(len(text.encode()) for text in corpus) / 1e6, 1),
        "vocabulary": VOCABULARY,
        "training_seconds": round(training, 2),
        "threads_1": compare(tokenizer, corpus, 1),
        f"threads_{cores}": compare(tokenizer, corpus, cores),
    }
    tokens = sum(map(len, tokenizer.encode_batch(corpus, cores)))
    figures |= {"tokens": tokens, "bytes_per_token": round(1e6 * figures["corpus_mb"] / tokens, 3)}
    record.write("tokenizer", "python bench/tokenizer.py", figures, about)
    worst = min(figures[key]["ratio"] for key in figures if key.startswith("threads"))
    if worst < FLOOR:
        raise SystemExit(f"{worst} times tiktoken's speed: below the floor of {FLOOR}")


if __name__ == "__main__":
    main()
