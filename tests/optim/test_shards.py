"""Who owns what: every number once, shares alike, and the same cut as torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.model.gpt import GPTConfig
from nanolearn.optim.shards import by_rows, deal


@given(st.integers(1, 100), st.integers(1, 9))
def test_a_table_is_cut_as_torch_cuts_it(rows, ranks):
    pieces = by_rows("table", rows, ranks)
    chunks = torch.arange(rows).chunk(ranks)  # what DTensor's Shard(0) does
    assert [piece.of(torch.arange(rows)).tolist() for piece in pieces] == [chunk.tolist() for chunk in chunks]
    assert [piece.owner for piece in pieces] == list(range(len(chunks)))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_a_share_and_one_matrix(sizes, ranks):
    costs = {str(number): size for number, size in enumerate(sizes)}
    owners = deal(costs, ranks)
    assert owners.keys() == costs.keys()
    loads = [sum(costs[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)
    assert owners == deal(costs, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("depth", [24, 25])
def test_state_of_a_rank_is_at_most_a_quarter_above_its_share(depth, ranks):
    """Where every shape has at least two matrices a rank; depth 24 on 8 ranks comes within a thousandth."""
    config = GPTConfig(depth, 64 * depth, depth // 2, depth // 2, 128, 2048, 32768)
    width, gates = config.n_embd, sum(map(config.has_value_table, range(depth)))
    shapes = {"attention": (4 * depth, width**2), "mlp": (2 * depth, 4 * width**2), "gate": (gates, 12 * config.n_head)}
    assert min(number for number, _ in shapes.values()) >= 2 * ranks or ranks > 6
    costs = {f"{kind}{i}": size for kind, (number, size) in shapes.items() for i in range(number)}
    tables = sum(config.parameter_groups()[name] for name in ("token_table", "value_tables", "head"))
    owners = deal(costs, ranks)
    # Muon keeps one number a weight, AdamW two.
    states = [
        sum(costs[n] for n, owner in owners.items() if owner == rank) + 2 * tables / ranks for rank in range(ranks)
    ]
    whole = sum(costs.values()) + 2 * tables
    assert max(states) <= (1.001 if (depth, ranks) == (24, 8) else 1.25) * whole / ranks
