"""What a run is judged by, on the way and at its end: bits per byte of validation text, and texts that it writes.

The same rows, prompts and random numbers each time, whatever the micro-batch and the number of ranks: what changes
between two looks is the model alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from nanolearn import distributed
from nanolearn.data.batch import Batch
from nanolearn.data.loader import FixedRows
from nanolearn.data.tokens import TokenStore
from nanolearn.evaluate.bits import Bits, bits_per_byte
from nanolearn.inference.sample import generate
from nanolearn.model.gpt import GPT
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer

PROMPTS = ("", "The history of", "The people of the United States")
SAMPLE_TOKENS = 32
PART = 0.01  # of the training tokens: what one validation on the way may read; ten of them cost 3% of a run
WHOLE_CAP = 20 << 19  # tokens of the last validation, where the split has more: sampling error is below 1e-3 there


def rows_to_judge(asked: int, sequence_len: int, there: int, training_tokens: int) -> tuple[int, int]:
    """Rows of a validation on the way, and of the last one. `asked` is tokens (-1: the whole split, up to a cap).

    Rounded up: fewer tokens than one row are one row, never none.

    >>> rows_to_judge(-1, sequence_len=128, there=5000, training_tokens=1_843_200)
    (144, 5000)
    >>> rows_to_judge(100, sequence_len=128, there=5000, training_tokens=1_843_200)
    (1, 1)

    Taught in chapter 07_pretrain.
    """
    last = min(math.ceil((WHOLE_CAP if asked < 0 else asked) / sequence_len), there)
    return min(max(int(PART * training_tokens / sequence_len), 1), last), last


class Judge:
    """Looks at a model while it learns; every rank makes one.

    `part` and `last` are rows of a validation on the way and at the end, 0 where it is off. `bits` and `samples` are
    those of the last look, `whole` whether all rows of the split were seen. `beat(phase)` is told of each piece of
    work. Taught in chapter 07_pretrain.
    """

    bits: Bits | None = None
    whole = False

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        recipe: Recipe,
        store: TokenStore,
        val_tokens: int,
        micro_batch: int,
        beat: Callable[[str], None],
    ) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, recipe.seed
        self.micro_batch, self.beat = micro_batch, beat
        self.samples: list[dict[str, str]] = []
        self.part = self.last = 0
        if val_tokens:
            self.rows = FixedRows(store, tokenizer.bos, recipe.sequence_len)
            sizes = rows_to_judge(val_tokens, recipe.sequence_len, self.rows.n_rows, recipe.tokens)
            self.part, self.last = sizes

    def validate(self, rows: int) -> Bits:
        """Bits per byte of the first rows, over all ranks, each of which calls it."""
        world = distributed.world()
        found = self.rows.batches(self.micro_batch, rows, world.rank, world.size)
        self.bits = bits_per_byte(self.model, map(self._moved, found), self.tokenizer.token_bytes())
        self.whole = rows == self.rows.n_rows
        return self.bits

    def _moved(self, batch: Batch) -> Batch:
        self.beat("validation")  # each one: all of them may take longer than a rank may be silent
        device: torch.device = self.model.head.weight.device
        return replace(batch, inputs=batch.inputs.to(device), targets=batch.targets.to(device))

    def write(self) -> list[dict[str, str]]:
        """Go on with each prompt: `prompt` and `text`. On one rank only: the others need not wait."""
        self.beat("samples")
        texts = generate(self.model, self.tokenizer, PROMPTS, SAMPLE_TOKENS, seed=self.seed)
        self.samples = [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, texts, strict=True)]
        return self.samples
