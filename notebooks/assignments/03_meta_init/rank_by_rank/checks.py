"""Checks of an initialisation by rows, against a slow one that draws each number by itself."""

import math
import random
import time
import tracemalloc

import numpy as np
import torch
from torch import nn

from nanolearn.rng import key


class _Shapes(nn.Module):
    """Parameters by name, on the meta device; a name may hold dots."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            owner = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))


MODEL = {"table.weight": (11, 3), "block.0.fc.weight": (4, 5), "block.0.norm": (7,), "block.1.fc.weight": (2, 3, 5)}


def _whole(name, shape, seed):
    """A parameter number by number, in order: what the statement says, with nothing skipped."""
    stream = np.random.Generator(np.random.Philox(key(seed, "init", name)))
    flat = []
    for _ in range(math.prod(shape)):
        u, v = stream.random(), stream.random()
        flat.append(0.02 * math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v))
    return torch.tensor(flat, dtype=torch.float64).float().view(shape)


def _rows(answer, shapes, seed, rank, ranks):
    found = answer.init_rows(_Shapes(shapes), seed, rank, ranks)
    assert isinstance(found, dict), f"the answer is a {type(found).__name__}: a dictionary by name is asked for"
    assert set(found) == set(shapes), f"names {sorted(found)}: every parameter of the model is asked for, on every rank"
    for name, rows in found.items():
        assert isinstance(rows, torch.Tensor) and rows.device.type == "cpu", f"{name} is no tensor on the CPU"
        assert rows.dtype == torch.float32, f"{name} is {rows.dtype}: computed in float64, rounded to float32 once"
    return found


def _close(mine, whole):
    # One rounding to float32 of numbers below 0.2: another order of the same float64 operations may differ by 1 ulp.
    return torch.allclose(mine, whole, rtol=2e-7, atol=1e-12)


def check_worked_example(answer):
    """one rank, one parameter: the numbers of the statement, in order"""
    found = _rows(answer, {"w": (2, 3)}, seed=5, rank=0, ranks=1)["w"]
    wanted = _whole("w", (2, 3), 5)
    assert found.shape == (2, 3), f"shape {tuple(found.shape)} for a parameter (2, 3) on one rank"
    assert _close(found, wanted), (
        f"a parameter (2, 3) on one rank is {found.flatten().tolist()}; write down for its first two elements which "
        "numbers of the stream they are made from"
    )


def check_each_rank_has_its_rows(answer):
    """pieces of ceil(n / ranks) rows, the last ones shorter or empty"""
    for ranks in (1, 2, 3, 4, 6, 13):
        for rank in range(ranks):
            for name, rows in _rows(answer, MODEL, 0, rank, ranks).items():
                n, *rest = MODEL[name]
                each = math.ceil(n / ranks)
                wanted = (max(0, min((rank + 1) * each, n) - rank * each), *rest)
                assert tuple(rows.shape) == wanted, (
                    f"rank {rank} of {ranks} holds {tuple(rows.shape)} of {name} {MODEL[name]}: list the first row of "
                    "every rank, and what is left for the last ones"
                )


def check_ranks_together_are_the_whole(answer):
    """the rows of all ranks, one under the other, are the parameter that was never split, to one rounding"""
    draw = random.Random(3)
    cases = [MODEL] + [{"w": (draw.randint(1, 40), draw.randint(1, 9)), "b": (draw.randint(1, 9),)} for _ in range(12)]
    for number, shapes in enumerate(cases):
        wanted = {name: _whole(name, shape, number) for name, shape in shapes.items()}
        for ranks in (1, 2, 3, 5, 8):
            pieces = [_rows(answer, shapes, number, rank, ranks) for rank in range(ranks)]
            for name, whole in wanted.items():
                together = torch.cat([piece[name] for piece in pieces])
                assert together.shape == whole.shape, f"{ranks} ranks hold {tuple(together.shape)} of {name}"
                differs = [row for row in range(len(whole)) if not _close(together[row], whole[row])]
                assert not differs, (
                    f"{name} {shapes[name]} on {ranks} ranks: rows {differs[:6]} are not those of the whole parameter; "
                    "at which number of the stream does the first row of their rank begin, and is it drawn there?"
                )


def check_other_parameters_change_nothing(answer):
    """a parameter's values don't depend on which others there are, or on their order"""
    alone = _rows(answer, {"block.1.fc.weight": (2, 3, 5)}, 1, 0, 2)["block.1.fc.weight"]
    for shapes in (MODEL, dict(reversed(MODEL.items()))):
        beside = _rows(answer, shapes, 1, 0, 2)["block.1.fc.weight"]
        assert torch.equal(alone, beside), (
            "the same parameter has other values in another model: what names its stream?"
        )


def check_seed_and_name_decide(answer):
    """same seed and name, same values; another seed or name, others, on every rank"""
    shapes = {"a": (8, 4), "b": (8, 4)}
    for rank in (0, 1):
        first, again, other = (_rows(answer, shapes, seed, rank, 2) for seed in (0, 0, 1))
        assert all(torch.equal(first[name], again[name]) for name in shapes), "one seed gave two models"
        assert not torch.equal(first["a"], first["b"]), "two parameters of one shape are equal"
        assert not torch.equal(first["a"], other["a"]), "two seeds gave one model"
        assert torch.isfinite(first["a"]).all() and first["a"].std() > 0, "these are no random numbers"
        whole = _rows(answer, shapes, 0, 0, 1)["a"]
        assert torch.equal(first["a"], whole[4 * rank : 4 * rank + 4]), (
            f"rank {rank} has other rows than the model that was never split: may a value depend on the rank?"
        )


def check_only_its_rows_are_drawn(answer):
    """the last of many ranks takes no more memory, and not much more time, than the first"""
    for rows, width, ranks in ((200_003, 6, 400), (2_000_003, 6, 4000)):  # the second one only if the first was cheap
        shapes, each = {"w": (rows, width)}, math.ceil(rows / ranks)
        last = (rows - 1) // each
        for rank, size in ((0, each), (last, rows - last * each)):
            found, peak = _traced(lambda r=rank, s=shapes, n=ranks: _rows(answer, s, 0, r, n)["w"])
            assert len(found) == size, f"{len(found)} rows on rank {rank} of {ranks}"
            # An element takes two numbers of 8 bytes and a few arrays on the way: 200 bytes an element is generous.
            assert peak < 200 * each * width + 1_000_000, (
                f"rank {rank} held {peak / 1e6:.0f} MB for {each * width * 4 / 1e6:.2f} MB of rows: how much was drawn?"
            )
    first, end = (_seconds(lambda r=rank, s=shapes, n=ranks: _rows(answer, s, 0, r, n)) for rank in (0, last))
    assert end < 10 * first + 0.03, (
        f"rank 0 took {1e3 * first:.1f} ms, rank {last} {1e3 * end:.1f} ms for no more rows: what does it do with the "
        "numbers of the ranks before it?"
    )


def _traced(call):
    """What a call gives, and the most bytes that it held; numpy tells tracemalloc of its arrays."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _seconds(call):
    """Processor seconds of a call, the best of three: other processes don't count."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return min(taken)
