"""One rank of test_optimizer.py: three steps with this rank's part of the gradients; what it holds goes to a file."""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from nanolearn import distributed
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.materialize import materialize
from nanolearn.optim.optimizer import Optimizer, Rates

# 26 matrices and three tables of 64 rows: enough that every rank owns some of each.
CONFIG = GPTConfig(n_layer=3, n_embd=32, n_head=2, n_kv_head=1, head_dim=16, sequence_len=16, vocab_size=64)
RATES = Rates(matrix=0.02, token_table=0.3, value_tables=0.15, head=0.008, x0=0.5, residual=0.005, smear=0.2, decay=0.1)
STEPS, PARTS = 3, 4


def gradient(name: str, shape: torch.Size, step: int, part: int) -> torch.Tensor:
    """A made-up gradient, in four parts: a rank of two adds two of them up, a rank of four has one."""
    seed = sum(map(ord, name)) * 100 + step * PARTS + part
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(model, step: int, parts: range) -> None:
    """Gradients by real backwards, one for each part, so that hooks run; some parameters are left untouched (T5)."""
    for part in parts:
        total = torch.zeros((), dtype=torch.float64)
        for number, (name, p) in enumerate(model.named_parameters()):
            if (number + part) % 5:  # each rank leaves out others
                total = total + (p.double() * gradient(name, p.shape, step, part)).sum()
        yield part == parts[-1], total


def main(folder: Path, dtype: str, master: str) -> None:
    world = distributed.start("cpu")
    model = materialize(CONFIG, "cpu", 0, getattr(torch, dtype))
    optimizer = Optimizer(model, RATES, master)
    each = PARTS // world.size
    squares = []
    for step in range(STEPS):
        for last, total in backward(model, step, range(world.rank * each, (world.rank + 1) * each)):
            if last:
                optimizer.expect()
            total.backward()
        optimizer.collect()
        squares.append(distributed.reduce_sum_(optimizer.square_sum().double()))
        optimizer.step(0.7, 0.9, 0.5)
        optimizer.zero_grad()
    state = optimizer.state_dict()
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}
    held = {
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "squares": torch.stack(squares),
        "state": local,
        "bytes": sum(t.numel() * t.element_size() for t in local.values()),
    }
    torch.save(held, folder / f"{world.size}-{world.rank}.pt")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
