"""The watch: T10 of the list of known failures, and the faults of a published z-score."""

import json
import math
import statistics

import numpy as np
import pytest

from nanolearn.train import watch as w
from nanolearn.train.watch import PATIENCE, SCALE_START, WINDOW, Watch, z_score


def filled(scaled=False, n=WINDOW):
    guard = Watch(scaled)
    for i, noise in enumerate(np.random.default_rng(0).normal(size=n)):
        guard.judge(i, 5.0 + 0.1 * float(noise), 1.0 + 0.01 * float(noise))
    return guard


def test_the_z_score_equals_its_definition():
    values = np.random.default_rng(1).normal(size=50).tolist()
    expected = (2.5 - statistics.fmean(values)) / statistics.pstdev(values)
    assert z_score(2.5, values) == pytest.approx(expected, rel=1e-12)


def test_a_large_spike_is_not_hidden_by_its_own_place_in_the_window():
    # inside its own window of 128 a value's z-score can't pass 127 / sqrt(128) = 11.2
    verdict = filled().judge(200, 100.0, 1.0)
    assert verdict.loss_z > 100
    assert "deviations above" in verdict.say
    assert not verdict.skip


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (5.0, math.inf), (math.inf, math.nan)])
def test_t10_a_step_that_is_not_finite_is_skipped_counted_and_never_enters_the_window(loss, norm):
    guard = filled()
    before = (list(guard.losses), list(guard.norms))
    verdict = guard.judge(300, loss, norm)
    assert verdict.skip
    assert not verdict.stop
    assert guard.skipped == 1
    assert (list(guard.losses), list(guard.norms)) == before
    assert guard.judge(301, 5.0, 1.0).loss_z is not None  # the watch is not dead


def test_t10_the_run_stops_after_several_in_a_row_but_not_when_good_steps_lie_between():
    guard = Watch()
    for step in range(4 * PATIENCE):
        assert not guard.judge(step, math.nan if step % 2 else 5.0, 1.0).stop
    guard = Watch()
    stops = [bool(guard.judge(step, math.nan, 1.0).stop) for step in range(PATIENCE)]
    assert stops == [False] * (PATIENCE - 1) + [True]


def test_t10_the_window_survives_a_checkpoint():
    guard, again = filled(), Watch()
    again.restore(json.loads(json.dumps(guard.state())))
    assert again.judge(1, 5.3, 1.1) == guard.judge(1, 5.3, 1.1)
    assert again.state() == guard.state()


def test_float16_overflow_halves_the_scale_and_is_not_a_broken_run():
    guard = filled(scaled=True)
    for step in range(2 * PATIENCE):
        verdict = guard.judge(step, 5.0, math.inf)
        assert verdict.skip
        assert not verdict.stop
    assert guard.scale == SCALE_START / 2 ** (2 * PATIENCE)


def test_float16_a_loss_that_is_nan_or_a_scale_of_one_ends_the_run_all_the_same():
    guard = Watch(scaled=True)
    assert [bool(guard.judge(s, math.nan, 1.0).stop) for s in range(PATIENCE)][-1]
    guard = Watch(scaled=True)
    verdicts = [guard.judge(s, 5.0, math.inf) for s in range(16 + PATIENCE)]
    assert verdicts[-1].stop


def test_float16_the_scale_grows_again_after_good_steps(monkeypatch):
    monkeypatch.setattr(w, "SCALE_GROWS_AFTER", 10)
    guard = filled(scaled=True, n=25)
    assert guard.scale == SCALE_START * 4
    plain = filled(scaled=False, n=25)
    assert plain.scale == 1.0


def test_a_run_that_leaves_float16_leaves_its_scale():
    guard = Watch()
    guard.restore(filled(scaled=True).state())
    assert guard.scale == 1.0
