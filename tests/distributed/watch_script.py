"""One rank of a run in which rank 1 alone loses its numbers at the given steps."""

import os
import sys
from pathlib import Path

from nanolearn.data.sources import open_source
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.model.gpt import GPT
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.trainer import train


def lose(bad: set[int]) -> None:
    """From now on the loss of the given calls, on rank 1, is no number."""
    plain, calls = GPT.loss_sum, 0

    def loss_sum(self, *given):
        nonlocal calls
        calls += 1
        nats = plain(self, *given)
        return nats * float("nan") if os.environ["RANK"] == "1" and calls in bad else nats

    GPT.loss_sum = loss_sum


def main(run: Path, tokenizer: Path, bad: set[int]) -> None:
    lose(bad)
    recipe = Recipe.load(run / "recipe.json")
    execution = Execution.load(run / "execution.json")
    source = open_source(recipe.data)
    train(recipe, execution, run, machine=cpu(), source=source, tokenizer=Tokenizer.load(tokenizer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), {int(word) for word in sys.argv[3].split(",")})
