"""The simulated device behaves as a device with queues does, and a timeline's numbers are those of its spans."""

import threading
import time

import pytest
import torch

from nanolearn.data.batch import Batch
from nanolearn.data.prefetch import Prefetcher, Staging
from nanolearn.lab import timelines
from nanolearn.lab.timelines import COMPUTE, COPY, READ, SimulatedDevice, Stream, Timeline

CPU = torch.device("cpu")


def batch(number: int) -> Batch:
    return Batch(torch.full((2, 3), number), torch.full((2, 3), -number), row=number, epoch=0)


def test_a_launch_returns_at_once_and_synchronize_waits():
    with SimulatedDevice() as device:
        begun = time.perf_counter()
        device.compute(0.2, row=0)
        launched = time.perf_counter() - begun
        device.synchronize()
        done = time.perf_counter() - begun
    assert launched < 0.1 < 0.2 <= done
    (span,) = device.timeline.spans
    assert span.lane == COMPUTE and span.ended - span.begun >= 0.2


def test_without_queues_each_call_holds_the_host_until_its_work_is_done():
    with SimulatedDevice(copy_seconds=0.1, queues=False) as device:
        begun = time.perf_counter()
        device.compute(0.1, row=0)
        target = device.copy(torch.ones(2))
        assert time.perf_counter() - begun >= 0.15
        assert target.tolist() == [1, 1]


def test_d10_a_copy_takes_what_the_buffer_holds_when_it_runs_not_when_it_was_queued():
    with SimulatedDevice(copy_seconds=0.2) as device:
        buffer = device.pinned(torch.zeros(3))
        buffer.fill_(1)
        target = device.copy(buffer)
        buffer.fill_(2)  # a tenth of a second before the copy moves the bytes
        device.synchronize()
    assert target.tolist() == [2, 2, 2]


def test_what_is_computed_waits_for_its_copy_and_the_host_does_not():
    with SimulatedDevice(copy_seconds=0.2) as device:
        target, seen = device.copy(torch.full((1,), 7)), []
        event = device.record()
        begun = time.perf_counter()
        device.await_on_device(event, (target,))
        device.compute(0.0, 0, lambda: seen.append(int(target)) or 7)
        assert time.perf_counter() - begun < 0.1
        device.synchronize()
    assert seen == [7]
    assert device.timeline.of(COMPUTE)[0].begun >= device.timeline.of(COPY)[-1].ended


def test_the_packages_staging_runs_on_it_with_every_batch_whole():
    with SimulatedDevice(copy_seconds=0.01) as device:
        reading = timelines.slow(map(batch, range(6)), 0.001, device.timeline)
        with Prefetcher(reading, CPU, travel=Staging(device)) as ahead:
            for moved in ahead:
                device.compute(0.002, moved.row, lambda moved=moved: int(moved.inputs.float().mean()))
            device.synchronize()
    assert [span.row for span in device.timeline.of(COMPUTE)] == list(range(6))
    assert [span.row for span in device.timeline.of(READ)] == list(range(6))
    assert [span.row for span in device.timeline.of(COPY)] == [row for row in range(6) for _ in range(2)]


def test_what_fails_on_the_device_is_raised_where_the_host_waits_and_nothing_hangs():
    with SimulatedDevice() as device:
        device.compute(0.0, 0, lambda: 1 // 0)
        device.compute(0.0, 1)
        with pytest.raises(ZeroDivisionError):
            device.synchronize()
        device.synchronize()


def test_closing_finishes_what_is_queued_and_leaves_no_thread():
    before, done = threading.active_count(), []
    stream = Stream()
    for number in range(5):
        stream.put(lambda number=number: done.append(number))
    stream.close()
    assert done == list(range(5))
    assert threading.active_count() == before


def test_idle_counts_gaps_between_the_first_and_the_last_span():
    line = Timeline()
    for row, begun, ended in ((1, 12.0, 13.0), (0, 10.0, 11.0), (2, 13.0, 14.0)):
        line.add(COMPUTE, row, begun, ended)
    assert [span.row for span in line.of(COMPUTE)] == [0, 1, 2]
    assert line.busy(COMPUTE) == 3
    assert line.idle(COMPUTE) == pytest.approx(0.25)


def test_a_slow_reader_takes_the_next_of_its_times():
    line = Timeline()
    assert [one.row for one in timelines.slow(map(batch, range(2)), iter([0.0, 0.1]), line)] == [0, 1]
    first, second = line.of(READ)
    assert first.ended - first.begun < 0.1 <= second.ended - second.begun


def test_a_figure_draws_a_bar_for_each_span_up_to_its_end():
    line = Timeline()
    for row in range(4):
        line.add(READ, row, 5.0 + row, 6.0 + row)
    (axes,) = timelines.figure({"four": line}, [READ], until=2.5).axes
    assert [round(patch.get_x()) for patch in axes.patches] == [0, 1000, 2000]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]


def test_the_depth_figure_shows_every_measurement():
    (axes,) = timelines.depth_figure({1: 0.2, 2: 0.1}, {1: [0.2, 0.3], 2: [0.1, 0.1]}).axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in points] == [[20, 30], [10, 10]]
