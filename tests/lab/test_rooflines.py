"""What chapter 06 measures and draws with: bytes against tensors counted by hand, times from a clock that is told."""

import numpy as np
import pytest
import torch

from nanolearn import flops
from nanolearn.lab import rooflines
from nanolearn.lab.rooflines import Traffic, band, side_by_side
from nanolearn.recipe import Recipe
from nanolearn.roofline import Roof


def test_traffic_is_what_each_operator_reads_and_writes():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    with Traffic() as moved:
        c = a @ b  # 128 + 64 + 32 numbers
        c.add_(1)  # read and written: the same 32 twice
        c.view(-1, 2).t()[0]  # views
    assert (moved.bytes, moved.operators) == (4 * (224 + 64), 2)


def test_traffic_sees_the_backward_and_what_has_no_memory():
    w = torch.ones(1000, requires_grad=True)
    with Traffic() as forward:
        y = w * 2
    with Traffic() as both:
        (w * 2).backward(torch.ones(1000))
    assert both.bytes > forward.bytes == y.nbytes * 2
    with Traffic() as meta:
        torch.empty(1000, device="meta") + 1
    assert meta.bytes == 8000


def test_calls_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    order, clock = [], iter(range(100))
    monkeypatch.setattr(rooflines, "perf_counter", lambda: next(clock))
    taken = side_by_side({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, lambda: order.append("w"))
    assert [one for one in order if one != "w"] == ["a", "b"] * 4
    assert order[:3] == ["w", "a", "w"], "the clock is read only after the device is done"
    assert all((seconds == 1).all() and seconds.shape == (3,) for seconds in taken.values())


def test_a_slow_machine_makes_fewer_rounds_but_three(monkeypatch):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(rooflines, "perf_counter", lambda: next(clock))
    assert len(side_by_side({"a": lambda: None}, 50, lambda: None)["a"]) == 3


def test_a_band_names_median_range_and_number():
    assert band([1, 2, 9], ".1f") == "2.0 (1.0 to 9.0, n=3)"


def test_points_and_roofs_are_all_drawn():
    roofs = {"a": Roof(1e12, 1e10, ""), "b": Roof(1e11, 1e10, "")}
    (axes,) = rooflines.roofline_figure(roofs, {"add": (0.1, 1e9), "mm": (500.0, 9e10)}).axes
    assert {text.get_text() for text in axes.texts} == {"add", "mm"}
    tops = [line.get_ydata().max() for line in axes.lines if len(line.get_xdata()) == 3]
    assert tops == [1e12, 1e11]
    assert axes.get_xlim()[0] < 0.1 and axes.get_xlim()[1] > 500


def test_every_share_is_a_bar_and_100_percent_is_marked_where_it_is_passed():
    shares = rooflines.shares_by_definition(Recipe.from_depth(24).shape(), 983_000, 989.4e12, 8)
    # 9.2107e9 x 983,000 / 7.915e15 by hand.
    assert shares["palm"] == pytest.approx(1.144, abs=1e-3)
    assert set(shares) == set(flops.DEFINITIONS)
    (axes,) = rooflines.definitions_figure({"depth 24": shares}).axes
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [round(100 * share, 6) for share in shares.values()]
    assert len(axes.lines) == 1
    assert not rooflines.definitions_figure({"a": {"palm": 0.5}}).axes[0].lines


def test_causes_show_the_whole_range_and_the_median():
    (axes,) = rooflines.causes_figure({"x": ([0.1, 0.5, 0.3], [0.05, 0.1, 0.2])}).axes
    ranges, medians = axes.lines[::2], axes.lines[1::2]
    assert [list(map(float, line.get_xdata())) for line in ranges] == [[10.0, 50.0], [5.0, 20.0]]
    assert [float(np.ravel(line.get_xdata())[0]) for line in medians] == [30.0, 10.0]


def test_parts_of_a_step_lie_end_to_end():
    (axes,) = rooflines.spent_figure({"a": 0.1, "b": 0.2}, 0.4).axes
    assert [(round(bar.get_x()), round(bar.get_width())) for bar in axes.patches] == [(0, 100), (100, 200), (0, 400)]


def test_the_dial_draws_what_its_controls_say_and_doubts_what_cannot_be():
    depth, window, speed, device, picture = rooflines.dial().children
    assert "<figure" in picture.value, "it draws before anything is turned"
    device.value = "AMD Instinct MI300X"
    speed.value, window.value = 524_288 / 7.7, "L"
    assert "canonical 27.5%" in picture.value and "no machine" not in picture.value
    speed.value, depth.value = 1e6, 32
    assert "no machine does that" in picture.value
