"""One rank of a run whose ranks have caches of their own, with other text in each."""

import os
import sys
from pathlib import Path

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import cpu
from nanolearn.recipe import Recipe
from nanolearn.train.launch import prepare
from nanolearn.train.trainer import train

if __name__ == "__main__":
    run, mine = Path(sys.argv[1]), sys.argv[2 + int(os.environ["RANK"])]
    os.environ["NANOLEARN_CACHE"] = f"{mine}-cache"
    recipe = Recipe.load(run / "recipe.json")
    source, tokenizer = prepare(recipe.model_copy(update={"data": mine}))
    try:
        train(recipe, Execution.load(run / "execution.json"), run, machine=cpu(), source=source, tokenizer=tokenizer)
    except UserError as error:
        print(error)
