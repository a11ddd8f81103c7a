"""The two curves of a run: what is drawn of its records, and how thinly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.lab import curves, plots


def step(number: int, loss: float | None = 5.0, seconds: float = 0.5) -> dict:
    constant = {"rate": 1.0, "grad_norm": 0.4, "tokens_per_second": 1000.0, "mfu": None, "stall": 0.0}
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 512 * number,
        "seconds": seconds,
        **constant,
    }


def test_a_resumed_run_shows_its_history_but_not_the_one_that_is_gone():
    history = [*map(step, (1, 2, 3, 4)), {"kind": "validation", "step": 4, "tokens": 2048, "bpb": 2.0}]
    seen = curves.Curves(history)
    seen.add({"kind": "start", "step": 2})
    seen.add(step(3, loss=4.0))
    assert seen.loss == [(1, 512, 5.0), (2, 1024, 5.0), (3, 1536, 4.0)]
    assert seen.bits == []


def test_a_long_run_draws_no_more_points_than_a_short_one():
    _, axes = plots.figure(2)
    curves.Curves(map(step, range(1, 30_001))).draw(*axes)
    assert len(axes[0].lines[0].get_xdata()) == curves.POINTS


def test_a_step_without_a_number_is_a_gap():
    assert [point[0] for point in curves.Curves([step(1), step(2, loss=None), step(3)]).loss] == [1, 3]


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(1, 50))
def test_thinning_keeps_order_bounds_and_the_mean_of_equal_groups(values, points):
    x, y = curves.thin(range(len(values)), values, points)
    assert len(x) == len(y) == min(points, len(values))
    assert (np.diff(x) > 0).all()
    if values:
        assert min(values) - 1e-6 <= y.min()
        assert y.max() <= max(values) + 1e-6
    if values and len(values) % points == 0:
        assert np.isclose(y.mean(), np.mean(values), atol=1e-6)


def test_a_validation_over_more_text_is_no_part_of_the_curve():
    few = {"kind": "validation", "step": 5, "tokens": 50, "bpb": 2.5, "rows": 6}
    points = curves.Curves(
        [few, few | {"step": 10, "tokens": 100, "bpb": 2.4}, few | {"step": 10, "tokens": 100, "rows": 60}]
    )
    assert [bits for _, _, bits in points.bits] == [2.5, 2.4]
    assert [bits for _, _, bits in points.final] == [2.5]


def test_a_redraw_takes_off_only_what_it_drew():
    _, axes = plots.figure(2)
    axes[0].plot([0, 1], [2, 2])
    drawn = curves.Curves([step(1), step(2)])
    drawn.draw(*axes)
    drawn.add(step(3))
    drawn.draw(*axes)
    assert [len(line.get_xdata()) for line in axes[0].lines] == [2, 3]
