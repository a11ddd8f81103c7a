"""What a measured process says of its memory: against allocations of known size, and where measuring goes wrong."""

import pytest
import torch
from torch import nn

from nanolearn.errors import UserError
from nanolearn.lab import memory
from nanolearn.lab.memory import Peak
from nanolearn.model.gpt import GPTConfig

MB = 1_000_000
SLACK = 8 * MB  # pages of code that are first touched, and blocks that the allocator keeps
WHOLE = GPTConfig(n_layer=2, n_embd=256, n_head=2, n_kv_head=2, head_dim=128, sequence_len=64, vocab_size=32768)


def keeps(megabytes):
    import torch

    return {"a": torch.ones(megabytes * 250_000)}


def holds_twice_for_a_moment(megabytes):
    import torch

    a = torch.ones(megabytes * 250_000)
    a.clone()
    return {"a": a}


def asks_and_never_writes(megabytes):
    import torch

    return {"a": torch.empty(megabytes * 250_000)}


def fails():
    raise ValueError("no weights")


def gives_no_tensors():
    return 3


def is_killed():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def whole(config, seed):
    from nanolearn.model.materialize import materialize

    return materialize(config, "cpu", seed)


@pytest.mark.slow
class TestMeasure:
    def test_known_sizes(self):
        kept, twice = memory.measure(keeps, 60), memory.measure(holds_twice_for_a_moment, 60)
        assert kept.stays == twice.stays == 60 * MB
        assert 60 * MB <= kept.peak <= 60 * MB + SLACK
        assert 120 * MB <= twice.peak <= 120 * MB + SLACK
        assert twice.ratio == pytest.approx(2, abs=0.15)
        assert kept.device == 0

    def test_memory_that_nobody_writes_is_not_resident(self):
        asked = memory.measure(asks_and_never_writes, 60)
        assert asked.stays == 60 * MB
        assert asked.peak < SLACK

    def test_what_this_process_holds_is_no_part_of_it(self):
        """ru_maxrss, kept through fork and exec, would say at least 300 MB."""
        held = torch.ones(75_000_000)
        assert memory.measure(keeps, 20).peak < 20 * MB + SLACK
        assert held.sum() > 0

    def test_the_packages_way_holds_nothing_twice_and_gives_the_same_weights(self):
        first, again, other = (memory.measure(whole, WHOLE, seed) for seed in (0, 0, 1))
        assert first.stays == 4 * sum(WHOLE.parameter_groups().values())
        assert 0 <= first.peak - first.stays < 12 * MB  # a second copy of the largest table would be 34
        assert first.digest == again.digest != other.digest

    def test_a_failure_comes_with_its_traceback(self):
        with pytest.raises(RuntimeError, match="ValueError: no weights"):
            memory.measure(fails)
        with pytest.raises(RuntimeError, match="exit code 1 "):
            memory.measure(gives_no_tensors)

    def test_a_killed_process_is_short_of_memory(self):
        with pytest.raises(MemoryError, match="exit code -9"):
            memory.measure(is_killed)

    def test_a_limit_is_kept(self):
        assert memory.measure(keeps, 20, limit=80 * MB).stays == 20 * MB
        with pytest.raises(MemoryError, match="can't allocate memory"):
            memory.measure(keeps, 100, limit=80 * MB)


def test_a_limit_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "LINUX", False)
    with pytest.raises(UserError, match="run this on Linux"):
        memory.measure(keeps, 1, limit=MB)


def test_the_highest_is_at_least_what_is_held_now():
    held = torch.ones(5_000_000)
    assert memory.highest() >= held.nbytes


def test_without_proc_the_highest_is_what_getrusage_says(monkeypatch):
    import resource

    monkeypatch.setattr(memory, "LINUX", False)
    assert memory.highest() == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.1)


def test_a_tied_weight_is_counted_once_and_what_is_on_meta_not_at_all():
    model = nn.Module()
    model.table, model.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.head.weight = model.table.weight
    model.register_buffer("steps", torch.zeros(3))
    model.register_parameter("planned", nn.Parameter(torch.empty(1000, device="meta")))
    found = list(memory.tensors(model))
    assert [name for name, _ in found] == ["steps", "table.weight"]
    assert memory.stays(found) == 4 * (8 * 4 + 3)
    assert memory.stays([("a", model.table.weight.data), ("b", model.table.weight.data[2:])]) == 4 * 8 * 4


def test_a_digest_sees_names_and_values():
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    assert memory.digest([("a", ones)]) == memory.digest([("a", torch.ones(3))])
    assert memory.digest([("a", ones)]) != memory.digest([("b", ones)])
    assert memory.digest([("a", ones)]) != memory.digest([("a", twos)])
    assert memory.digest([("a", ones.bfloat16())])


def test_a_devices_peak_is_asked_for_only_where_one_was_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert memory.on_device() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert memory.on_device() == 123


def made(peak, stays=100 * MB):
    return Peak(peak, stays, 0, 2.0, "", [(0.0, 0), (1.0, peak), (2.0, stays)])


def test_bars_are_the_largest_peak_and_say_how_often_it_is_what_stays():
    (axes,) = memory.peaks_figure({"once": [made(101 * MB), made(105 * MB)], "twice": [made(210 * MB)]}).axes
    assert [patch.get_width() for patch in axes.patches] == [105, 210]
    assert [text.get_text().strip() for text in axes.texts] == ["1.05x", "2.10x"]
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()


def test_curves_are_drawn_over_the_share_of_time_with_the_highest_point_marked():
    (axes,) = memory.curves_figure({"once": made(150 * MB)}).axes
    line, dot = axes.get_lines()
    assert line.get_xdata()[1] == 50
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (50, 150)


def test_losses_have_a_name_for_each_way_and_a_line_for_each_seed():
    (axes,) = memory.losses_figure({"right": [[5, 4], [5, 3]], "dead": [[5, 5]]}, chance=5.5).axes
    assert len(axes.get_lines()) == 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["right", "dead", "guessing"]
