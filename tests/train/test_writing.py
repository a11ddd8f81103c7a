"""Which file a tensor goes to, and that torch's own reader reads what is written here."""

import json

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from nanolearn.train import writing
from nanolearn.train.checkpoint import Manifest
from nanolearn.train.writing import FILE_BYTES, file_numbers

NAMES = [f"{kind}.{i}" for kind in ("model", "optimizer") for i in range(6)]
RANKS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2 * FILE_BYTES)), min_size=1, max_size=4)


@given(RANKS)
def test_files_are_alike_on_all_ranks_and_no_larger_than_they_must(held):
    numbers = file_numbers(held)
    assert numbers.keys() == set().union(*held)
    assert sorted(set(numbers.values())) == list(range(1, len(set(numbers.values())) + 1))
    for number in set(numbers.values()):
        names = [name for name in numbers if numbers[name] == number]
        assert len({name.split(".")[0] for name in names}) == 1  # weights never in one file with optimizer state
        for rank in held:
            mine = [rank[name] for name in names if name in rank]
            assert sum(mine) <= FILE_BYTES or len(mine) == 1


def test_the_files_are_those_of_torchs_own_writer(tmp_path):
    """Names and contents: only how the bytes come to the disk is ours."""
    tensors = {
        "model.w": torch.arange(6.0).view(2, 3),
        "model.step": torch.tensor(3),
        "optimizer.w.m": torch.ones(2).bool(),
    }
    tensors["optimizer.w.m"] = tensors["optimizer.w.m"].to(torch.bfloat16)
    manifest = Manifest(step=1, row=0, tokens=0, ranks=1, identity={}, watch={}, seconds={})
    ours = writing.save(tmp_path, tensors, manifest).path
    theirs = tmp_path / "theirs"
    numbers = file_numbers([writing.sizes(tensors)])
    dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(theirs), numbers, save_distributed=True))
    names = sorted(path.name for path in theirs.iterdir())
    assert names == sorted(path.name for path in ours.glob("*.safetensors"))
    for name in names:
        with safe_open(ours / name, "pt") as mine, safe_open(theirs / name, "pt") as other:
            assert sorted(mine.keys()) == sorted(other.keys())
            assert all(torch.equal(mine.get_tensor(key), other.get_tensor(key)) for key in mine.keys())  # noqa: SIM118
            places = [json.loads(file.metadata()["DCP_SHARDING_INFO"]) for file in (mine, other)]
            assert places[0] == places[1]
