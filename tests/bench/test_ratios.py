"""What the benchmarks promise, as ratios measured in one run: times belong to a machine, ratios to the code."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanolearn.data.sources import open_source, texts
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import train

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def bench_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def step_seconds(kind: str) -> float:
    """A process each, the better of two: how freed memory is treated can't be undone within one."""
    command = [sys.executable, str(BENCH / "train.py"), kind]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    return min(json.loads(said.splitlines()[-1]) for said in runs)


def test_training_is_faster_than_the_plain_loop_and_the_loader_twenty_times_faster_than_it():
    from data import in_memory, measure_loading

    ours = step_seconds("nanolearn")
    assert step_seconds("plain") / ours >= 1.3
    recipe = Recipe.from_depth(4, "laptop")
    lengths = np.random.default_rng(0).integers(20, 3000, 2000)
    loading = measure_loading(in_memory(lengths), recipe.sequence_len, recipe.rows_per_step, batches=50)
    assert loading["tokens_per_second"] >= 20 * recipe.batch_tokens / ours


def test_tokenising_keeps_up_with_tiktoken(embedded_corpus):
    from tokenizer import compare

    corpus = [text for _, text in zip(range(2000), texts(open_source("embedded")), strict=False)]
    assert compare(train(corpus, 1024), corpus, threads=1)["ratio"] >= 0.8
