"""One optimizer for 1 and N ranks: the same weights, the same norm, and state that is shared out."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("optimizer_script.py")


def held(folder: Path, world: int, dtype: str = "float64", master: str = "fp32") -> list[dict]:
    run_ranks(SCRIPT, world, str(folder), dtype, master)
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.slow
def test_t3_t5_one_two_and_four_ranks_have_the_same_weights_and_norm(tmp_path):
    """In float64; each rank leaves other parameters without a gradient, and none waits for another."""
    (alone,) = held(tmp_path, 1)
    for world in (2, 4):
        ranks = held(tmp_path, world)
        for rank in ranks:
            torch.testing.assert_close(rank["squares"], alone["squares"], rtol=1e-12, atol=0)
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-10, atol=1e-12, msg=name)
                assert torch.equal(rank["weights"][name], ranks[0]["weights"][name])
        for name, whole in alone["state"].items():
            parts = [rank["state"][name] for rank in ranks if name in rank["state"]]
            if name.endswith((".momentum", ".second_moment")):
                assert len(parts) == 1, name  # a matrix has one owner
                torch.testing.assert_close(parts[0], whole, rtol=1e-10, atol=1e-12)
            elif whole.ndim and whole.size(0) == 64:
                torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-12)
        # The model is too small for an even deal: at least nobody holds all.
        assert max(rank["bytes"] for rank in ranks) < 1.25 * alone["bytes"] / world


@pytest.mark.slow
def test_sharded_masters_on_two_ranks_equal_those_on_one(tmp_path):
    (alone,) = held(tmp_path, 1, "bfloat16", "sharded")
    one, two = held(tmp_path, 2, "bfloat16", "sharded")
    for name, weight in one["weights"].items():
        assert torch.equal(weight, two["weights"][name]), name
        # Gradients are summed in 16 bits, in another order. AdamW's first step is a rate long whatever the gradient's
        # size, so where the parts nearly cancel, a last bit turns the step around: in one number in a hundred or so.
        close = torch.isclose(weight, alone["weights"][name], rtol=2**-6, atol=0.02)
        assert close.float().mean() > 0.97, name
