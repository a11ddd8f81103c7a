"""Reading ahead: the same batches in the same order, no buffer overwritten under a copy, no thread left hanging."""

import threading
import time
import traceback

import pytest
import torch

from nanolearn.data import prefetch
from nanolearn.data.batch import Batch
from nanolearn.data.prefetch import PINNED_BUFFERS, Direct, Prefetcher, Staging, mover

CPU = torch.device("cpu")
PATIENCE = 20.0  # seconds before a test that waits for a thread fails


def batch(number: int, rows: int = 2) -> Batch:
    return Batch(torch.full((rows, 3), number), torch.full((rows, 3), -number), row=number, epoch=number // 5)


class LateLink:
    """A device that copies as late as it may: only when someone waits for an event. Counts what it is asked."""

    def __init__(self, guarded: bool = True) -> None:
        self.guarded = guarded  # False: the host's waiting does nothing, as if it had been forgotten
        self.lock = threading.Lock()
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.pinned_buffers = 0

    def pinned(self, like):
        self.pinned_buffers += 1
        return torch.empty_like(like)

    def copy(self, host):
        with self.lock:
            target = torch.zeros_like(host)
            self.queue.append((host, target))
            return target

    def record(self):
        with self.lock:
            return LateEvent(self, len(self.queue))

    def await_on_device(self, event, tensors):
        self.run_up_to(event.place)

    def run_up_to(self, place: int) -> None:
        with self.lock:
            for host, target in self.queue[self.done : place]:
                target.copy_(host)
            self.done = max(self.done, place)


class LateEvent:
    def __init__(self, link: LateLink, place: int) -> None:
        self.link, self.place = link, place

    def synchronize(self) -> None:
        if self.link.guarded:
            self.link.run_up_to(self.place)


def is_right(moved: Batch) -> bool:
    return bool((moved.inputs == moved.row).all() and (moved.targets == -moved.row).all())


def test_d10_a_pinned_buffer_is_never_overwritten_while_its_copy_is_queued():
    """Even on a device that is as late as it may be, every batch arrives as it was sent."""
    staging = Staging(LateLink())
    sent = [staging.send(batch(number)) for number in range(9)]
    assert all(is_right(staging.receive(one)) for one in sent)
    assert staging.link.pinned_buffers == 2 * PINNED_BUFFERS  # inputs and targets, allocated once


def test_d10_without_the_event_the_same_device_mixes_batches():
    """The test above has teeth; this is the fault that it would catch."""
    staging = Staging(LateLink(guarded=False))
    sent = [staging.send(batch(number)) for number in range(9)]
    right = [is_right(staging.receive(one)) for one in sent]
    assert right == [False] * 7 + [True] * 2


def test_d10_two_buffers_let_one_be_filled_while_the_other_is_copied():
    """The host waits for a copy only when both buffers are in use."""
    staging = Staging(LateLink())
    staging.send(batch(0))
    staging.send(batch(1))
    assert staging.link.done == 0
    staging.send(batch(2))
    assert staging.link.done == 2  # the first batch's two tensors


def test_a_batch_of_another_shape_gets_another_buffer():
    staging = Staging(LateLink())
    sent = [staging.send(batch(number, rows)) for number, rows in enumerate([2, 2, 5, 5, 2])]
    received = [staging.receive(one) for one in sent]
    assert [tuple(one.inputs.shape) for one in received] == [(2, 3), (2, 3), (5, 3), (5, 3), (2, 3)]
    assert all(map(is_right, received))


def test_t14_the_device_type_decides(monkeypatch):
    """A device such as cuda:1 is pinned, mps and cpu are not."""
    monkeypatch.setattr(prefetch, "CudaLink", lambda device: LateLink())
    for name, kind in (("cuda", Staging), ("cuda:1", Staging), ("mps", Direct), ("cpu", Direct)):
        assert type(mover(torch.device(name))) is kind


@pytest.mark.parametrize("late", [False, True])
def test_the_same_batches_in_the_same_order(late):
    travel = Staging(LateLink()) if late else None
    with Prefetcher(map(batch, range(50)), CPU, travel=travel) as ahead:
        received = list(ahead)
    assert [one.row for one in received] == list(range(50))
    assert [one.epoch for one in received] == [number // 5 for number in range(50)]
    assert all(map(is_right, received))
    assert list(ahead) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_reads_ahead_and_not_further_than_asked(depth):
    read = threading.Semaphore(0)
    count = 0

    def endless():
        nonlocal count
        while True:
            yield batch(count)
            count += 1
            read.release()

    with Prefetcher(endless(), CPU, depth) as ahead:
        for taken in range(3):
            # Without any request: `depth` batches wait, and the thread holds one more in its hand.
            while count < taken + depth:
                assert read.acquire(timeout=PATIENCE)
            time.sleep(0.05)
            assert count == taken + depth
            assert next(ahead).row == taken


def test_stall_is_the_time_that_the_consumer_waited():
    ready = threading.Event()

    def slow():
        time.sleep(0.3)
        yield batch(0)
        yield batch(1)
        ready.set()
        yield batch(2)

    with Prefetcher(slow(), CPU) as ahead:
        next(ahead)
        waited = ahead.stall_seconds
        assert 0.2 < waited < 10
        assert ready.wait(PATIENCE)
        time.sleep(0.1)  # computing, while the next batch waits
        next(ahead)
        assert ahead.stall_seconds - waited < 0.1


def failing():
    yield batch(0)
    yield batch(1)
    raise ZeroDivisionError("deep in the reading")


def test_an_exception_arrives_after_the_batches_before_it_and_shows_where_it_happened():
    ahead = Prefetcher(failing(), CPU)
    assert [next(ahead).row, next(ahead).row] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="deep in the reading") as caught:
        next(ahead)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_closing_ends_a_thread_that_waits_for_room():
    ahead = Prefetcher(map(batch, range(10**9)), CPU)
    next(ahead)
    start = time.perf_counter()
    ahead.close()
    ahead.close()
    assert time.perf_counter() - start < prefetch.CLOSING / 2
    assert not ahead._thread.is_alive()
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_does_not_hang_on_a_read_that_never_ends(monkeypatch):
    monkeypatch.setattr(prefetch, "CLOSING", 0.1)
    release = threading.Event()

    def stuck():
        release.wait(PATIENCE)
        yield batch(0)

    ahead = Prefetcher(stuck(), CPU)
    ahead.close()
    assert ahead._thread.is_alive()
    assert ahead._thread.daemon  # the process may end without it
    release.set()
    ahead._thread.join(PATIENCE)
    assert not ahead._thread.is_alive()


def test_an_exception_in_the_consumer_closes_it():
    with pytest.raises(KeyError), Prefetcher(map(batch, range(10**9)), CPU) as ahead:
        raise KeyError
    assert not ahead._thread.is_alive()
