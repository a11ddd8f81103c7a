"""A run that takes a second: a corpus of made-up sentences, a tokenizer of 300, a model of two layers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nanolearn.data.sources import Source, open_source, texts
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.tokenizer import train as train_tokenizer
from nanolearn.train import judge
from nanolearn.train.records import Result, read
from nanolearn.train.trainer import train

WORDS = [
    "the",
    "of",
    "and",
    "people",
    "history",
    "year",
    "river",
    "state",
    "built",
    "small",
    "long",
    "water",
    "great",
    "new",
    "in",
]


def write_corpus(folder: Path, documents: int = 400, words: int = 10) -> Path:
    """Text files of random words, the same ones for the same arguments."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(documents):
        chosen = random.choice(WORDS, size=random.integers(words // 2, 2 * words))
        (folder / f"{number:04d}.txt").write_text(" ".join(chosen) + ".")
    return folder


@dataclass
class Tiny:
    """What `train` needs, and a shorthand to call it."""

    corpus: Path
    source: Source
    tokenizer: Tokenizer

    def recipe(self, **dials) -> Recipe:
        usual = {
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 2,
            "n_kv_head": 2,
            "head_dim": 16,
            "sequence_len": 32,
            "vocab_size": self.tokenizer.vocab_size,
            "batch_tokens": 256,
            "steps": 12,
            "data": str(self.corpus),
        }
        return Recipe.from_depth(2, "laptop", **{**usual, **dials})

    def execution(self, **fields) -> Execution:
        return Execution(
            **{"device": "cpu", "micro_batch": 4, "num_threads": 1, "val_tokens": 0, "save_every": 100, **fields}
        )

    def train(self, run_dir: Path, recipe: Recipe | None = None, observers=(), **fields) -> Result:
        return train(
            recipe or self.recipe(),
            self.execution(**fields),
            run_dir,
            machine=cpu(),
            source=self.source,
            tokenizer=self.tokenizer,
            observers=observers,
        )


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Tiny:
    monkeypatch.setattr(judge, "SAMPLE_TOKENS", 3)
    corpus = write_corpus(tmp_path / "corpus")
    source = open_source(str(corpus))
    return Tiny(corpus, source, train_tokenizer(texts(source), 300))


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read(run_dir, "step")]


def rows(run_dir: Path) -> list[int]:
    return [record["row"] for record in read(run_dir, "step")]
