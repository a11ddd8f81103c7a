"""Schedules: ends, peaks, and no jump anywhere (T7)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolearn.optim.schedule import Schedule


def of_length(n):
    return Schedule(
        n, warmup=min(40, max(1, n // 20)), warmdown=0.65, final=0.05, momentum_ramp=min(400, int(0.35 * n))
    )


def test_ends_and_peaks():
    s = of_length(2000)
    assert s.rate(0) == pytest.approx(1 / 40) and s.rate(39) == s.rate(700) == 1
    assert s.rate(2000) == pytest.approx(0.05)
    assert s.momentum(0) == 0.85 and s.momentum(400) == pytest.approx(0.97) and s.momentum(2000) == pytest.approx(0.90)
    assert s.decay(0) == 1 and s.decay(1000) == pytest.approx(0.5) and s.decay(2000) == pytest.approx(0)


@given(n=st.integers(1, 3000))
def test_t7_no_step_changes_more_than_its_slope(n):
    s = of_length(n)
    slope = {
        "rate": max(1 / s.warmup, 0.95 / max(0.65 * n, 1)),
        "momentum": max(0.12 / max(s.momentum_ramp, 1), 0.07 / max(0.65 * n, 1)),
        "decay": 3.2 / 2 / n,
    }
    for name, allowed in slope.items():
        values = [getattr(s, name)(i) for i in range(n + 1)]
        assert max(abs(b - a) for a, b in zip(values, values[1:], strict=False)) <= allowed * 1.001
        assert all(0 <= v <= 1 for v in values)


def test_t7_at_500_steps_the_momentum_does_not_jump():
    s = of_length(500)
    assert abs(s.momentum(400) - s.momentum(399)) < 0.001


def test_warm_up_is_shorter_than_any_run():
    assert of_length(3).warmup == 1 and of_length(3).rate(0) == 1
