"""Training speed against a plain loop: the same model modules, the parts around them written the ordinary way.

The baseline: fp32, torch's cross_entropy on full logits, torch.optim.AdamW with its defaults, and the same Muon
mathematics looped over the matrices one by one. Both run the laptop preset's shape in one process each, alternating,
so that a busy neighbour hurts both alike. `python bench/train.py` takes about three minutes.
"""

import json
import subprocess
import sys
import time

import record
import torch
import torch.nn.functional as F

from nanolearn import host
from nanolearn.model.materialize import materialize
from nanolearn.optim.muon import moment_shape, muon_update
from nanolearn.optim.optimizer import Optimizer
from nanolearn.recipe import Recipe

STEPS, WARM, ROUNDS = 8, 2, 3


class Plain:
    """Matrices one by one by Muon, everything else by torch.optim.AdamW as it comes."""

    def __init__(self, model, rates) -> None:
        self.rates = rates
        self.matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
        inside = {id(p) for p in self.matrices}
        self.adam = torch.optim.AdamW([p for p in model.parameters() if id(p) not in inside])
        self.state = [
            (torch.zeros(1, *p.shape), torch.zeros(moment_shape(torch.Size((1, *p.shape))))) for p in self.matrices
        ]

    @torch.no_grad()
    def step(self) -> None:
        for p, (buffer, moment) in zip(self.matrices, self.state, strict=True):
            update = muon_update(p.grad.unsqueeze(0), buffer, moment, 0.95)[0]
            rate = self.rates.matrix * max(1.0, p.size(0) / p.size(1)) ** 0.5
            p -= rate * (update + self.rates.decay * p * (update * p >= 0))
        self.adam.step()


def one_run(kind: str, recipe: Recipe) -> float:
    """Seconds a step of one kind, the median of STEPS after WARM."""
    model = materialize(recipe.gpt_config(), "cpu", seed=0)
    shape = (recipe.rows_per_step, recipe.sequence_len)
    tokens, targets = torch.randint(recipe.vocab_size, (2, *shape), generator=torch.manual_seed(0)).unbind()
    if kind == "nanolearn":
        host.reuse_freed_memory()
        optimizer = Optimizer(model, recipe.rates())
    else:
        if kind == "plain, freed memory kept":
            host.reuse_freed_memory()
        optimizer = Plain(model, recipe.rates())
    seconds = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        if kind == "nanolearn":
            (model.loss_sum(tokens, targets) / targets.numel()).backward()
            optimizer.step(1.0, 0.95, 1.0)
        else:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[WARM:])[STEPS // 2]


KINDS = ("nanolearn", "plain", "plain, freed memory kept")


def main() -> None:
    about = record.machine()
    recipe = Recipe.from_depth(4, "laptop")
    best = dict.fromkeys(KINDS, float("inf"))
    for _ in range(ROUNDS):
        for kind in KINDS:
            # A process each: how freed memory is treated can't be undone within one.
            done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, check=True)
            best[kind] = min(best[kind], json.loads(done.stdout.splitlines()[-1]))
    figures = {
        "shape": f"depth 4, laptop preset: {recipe.rows_per_step} x {recipe.sequence_len} tokens a step",
        "tokens_per_second": {kind: round(recipe.batch_tokens / s) for kind, s in best.items()},
        "ratio_to_plain": round(best["plain"] / best["nanolearn"], 2),
        "ratio_to_plain_with_freed_memory_kept": round(best["plain, freed memory kept"] / best["nanolearn"], 2),
    }
    record.write("train", "python bench/train.py", figures, about)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one_run(sys.argv[1], Recipe.from_depth(4, "laptop"))))
    else:
        main()
