"""The pictures of packing plans: their numbers against a slow count, and a dial that redraws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolearn.data.packing import PACKERS, pack
from nanolearn.lab import packers


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(2, 20), st.sampled_from(sorted(PACKERS)))
def test_what_is_lost_along_the_way_is_counted_row_by_row(lengths, capacity, packer):
    lengths = np.array(lengths)
    plan = pack(lengths, capacity, packer)
    lost = packers.lost_along(plan, lengths)
    begun: set[int] = set()
    for row in range(plan.n_rows):
        begun |= set(plan.doc[plan.row_start[row] : plan.row_start[row + 1]].tolist())
        of_these = [doc in begun for doc in plan.doc.tolist()]
        held, tokens = plan.length[of_these].sum(), lengths[sorted(begun)].sum()
        assert lost[row] == pytest.approx(1 - held / tokens)
    if begun == set(range(len(lengths))):
        assert lost[-1] == pytest.approx(plan.loss)


def test_every_piece_is_a_bar_and_what_is_lost_is_hatched():
    lengths = np.array([11, 4, 3, 9])
    (axes,) = packers.rows_figure(lengths, 8, ["greedy_crop"]).axes
    plan = pack(lengths, 8, "greedy_crop")
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    bars = [patch for patch in axes.patches if not patch.get_hatch() and patch.get_linestyle() not in (":", "dotted")]
    assert len(bars) == len(plan.doc)
    assert sum(patch.get_width() for patch in hatched) == plan.tokens_cropped > 0


def test_a_long_plan_is_drawn_as_far_as_it_can_be_read():
    (axes,) = packers.rows_figure(np.full(100, 7), 8, ["concatenate"]).axes
    assert len(axes.texts) <= packers.DRAWN


def test_the_dial_draws_what_its_sliders_say():
    dial = packers.dial(np.array([3, 9, 5]))
    capacity, which, picture = dial.children
    capacity.value, which.value = 6, list(PACKERS).index("greedy_crop")
    assert "greedy_crop: 2 rows, 100% used, 47% lost." in picture.value
