"""One rank of a run over a Hub data set: `python scale_script.py FOLDER`, which holds recipe, execution, tokenizer."""

import sys
from pathlib import Path

from nanolearn import distributed
from nanolearn.data.sources import open_source
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.trainer import train

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    recipe = Recipe.load(folder / "recipe")
    source, tokenizer = open_source(recipe.data), Tokenizer.load(folder / "tokenizer")
    execution = Execution.load(folder / "execution")
    train(recipe, execution, folder / "run", machine=cpu(), source=source, tokenizer=tokenizer)
    distributed.stop()
