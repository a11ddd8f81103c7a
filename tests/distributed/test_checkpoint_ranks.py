"""Checkpoints of several ranks: resharded exactly, agreed upon, and never waited for in vain. C2 and C6."""

from pathlib import Path

import pytest
import torch

from nanolearn.train import checkpoint
from nanolearn.train.checkpoint import FOLDER, MODEL, folder_name
from tests.distributed import checkpoint_script
from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("checkpoint_script.py")
ALL = {"model.table": (5, 3), "model.w": (4, 3), "model.b": (7,)}


@pytest.mark.slow
def test_c2_two_ranks_then_one_then_four_hold_exactly_the_same(tmp_path):
    """Tensors that all ranks hold, that one holds, and tables by rows with short and empty shards."""
    sizes = [run_ranks(SCRIPT, 2, "save", str(tmp_path), "1")]
    sizes += [run_ranks(SCRIPT, world, "go_on", str(tmp_path), str(step)) for step, world in ((2, 1), (3, 4))]
    rows = sum(checkpoint_script.TABLES.values())
    total = 4 * (3 * rows + 12 + 7 + 1 + 3 * 9)
    for said in sizes:  # nothing is copied, or written, twice
        assert sum(int(text) for text in said) == total
    assert max(int(text) for text in sizes[2]) < 0.45 * total
    path = tmp_path / FOLDER / folder_name(3)
    assert len(list(path.glob("*.safetensors"))) >= 4
    weights = checkpoint.load_weights(path)  # this process has no group
    assert weights.keys() == {name.removeprefix(MODEL) for name in ALL}
    for name, shape in ALL.items():
        assert torch.equal(weights[name.removeprefix(MODEL)], checkpoint_script.whole(name, shape)), name


@pytest.mark.slow
def test_c4_c6_what_one_rank_finds_or_fails_at_is_so_for_all(tmp_path):
    run_ranks(SCRIPT, 2, "refuse", str(tmp_path), "1", timeout=90)


@pytest.mark.slow
def test_a_rank_that_dies_during_a_save_is_not_waited_for(tmp_path):
    said, _ = run_ranks(SCRIPT, 2, "lonely", str(tmp_path), "1", timeout=60)
    seconds, raised = said.split()
    assert float(seconds) < 20
    assert raised == "raised"
    assert checkpoint.newest(tmp_path).manifest.step == 1
