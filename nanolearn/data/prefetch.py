"""Batches ready on the device before they are asked for: a thread reads ahead while the model computes.

On CUDA and ROCm a copy that overlaps with computing must start from pinned memory, and returns at once, long
before the bytes have moved. A single pinned buffer is therefore a race: the next batch overwrites it while
its copy is still queued, and the model trains on a mixture of two batches without any error. Here two buffers
take turns, and each is guarded by an event that says when its last copy has left it. On other devices there
is nothing to pin: the thread only reads ahead.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from nanolearn.data.batch import Batch

PINNED_BUFFERS = 2  # one is filled while the other is copied; a third would only wait longer
CLOSING = 5.0  # seconds that close() gives a thread in the middle of a read before leaving it to end by itself


class Link(Protocol):
    """What staging needs of a device: pinned memory, queued copies, events. Tests give one that is late on purpose."""

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised host buffer of that shape which the device can copy from by itself."""

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Queue a copy to the device and return its target at once."""

    def record(self) -> Any:
        """An event that is done when all copies queued so far are; it has synchronize()."""

    def await_on_device(self, event: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make what the device computes from now on wait for the event; the host does not wait."""


class CudaLink:
    """Pinned memory and a stream of its own for copies, on CUDA or ROCm (which torch calls "cuda" too)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """A page-locked buffer: the device reads it without the processor."""
        # A thread starts on device 0: without this every rank would also hold a context there, half a GB.
        with torch.cuda.device(self.device):
            return torch.empty_like(like, pin_memory=True)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """Queue on the copy stream; the tensor may be used only after `await_on_device`."""
        with torch.cuda.stream(self.stream):
            return host.to(self.device, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """An event on the copy stream."""
        return self.stream.record_event()

    def await_on_device(self, event: torch.cuda.Event, tensors: tuple[torch.Tensor, ...]) -> None:
        """The current stream waits; its allocator learns that it uses memory of the copy stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)


@dataclass
class _Buffer:
    inputs: torch.Tensor
    targets: torch.Tensor
    copied: Any = None


class Staging:
    """Copies batches to a device through pinned buffers that take turns, each guarded by an event.

    `send` runs in the reading thread, `receive` in the thread that computes.

    Taught in chapter 04_prefetching.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._buffers: list[_Buffer | None] = [None] * PINNED_BUFFERS
        self._turn = 0

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        """Queue a batch's copies; returns the batch on the device and the event after which it may be used."""
        buffer = self._free_buffer(batch)
        buffer.inputs.copy_(batch.inputs)
        buffer.targets.copy_(batch.targets)
        moved = replace(batch, inputs=self.link.copy(buffer.inputs), targets=self.link.copy(buffer.targets))
        buffer.copied = self.link.record()
        return moved, buffer.copied

    def receive(self, sent: tuple[Batch, Any]) -> Batch:
        """The batch, safe to compute with."""
        batch, copied = sent
        self.link.await_on_device(copied, (batch.inputs, batch.targets))
        return batch

    def _free_buffer(self, batch: Batch) -> _Buffer:
        """The buffer whose turn it is, once its last copy has left it."""
        buffer = self._buffers[self._turn]
        if buffer is not None:
            buffer.copied.synchronize()
        if buffer is None or buffer.inputs.shape != batch.inputs.shape:
            buffer = _Buffer(self.link.pinned(batch.inputs), self.link.pinned(batch.targets))
            self._buffers[self._turn] = buffer
        self._turn = (self._turn + 1) % PINNED_BUFFERS
        return buffer


class Direct:
    """No pinned memory and no streams (CPU, MPS): a plain copy, or none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, batch: Batch) -> Batch:
        """The batch on the device."""
        return replace(batch, inputs=batch.inputs.to(self.device), targets=batch.targets.to(self.device))

    def receive(self, sent: Batch) -> Batch:
        """The same batch."""
        return sent


def mover(device: torch.device) -> Staging | Direct:
    """How batches travel to a device: by its type, so that "cuda:1" is pinned and "mps" is not.

    >>> type(mover(torch.device("cpu"))).__name__
    'Direct'

    Taught in chapter 04_prefetching.
    """
    return Staging(CudaLink(device)) if device.type == "cuda" else Direct(device)


class Prefetcher:
    """Iterates over the batches of `iterator`, in its order, already on `device`; reads up to `depth` ahead.

    `travel` is how they get there: by the device's type, unless a simulated one is given. `stall_seconds` is how long
    the consumer has waited so far: near 0 while reading keeps up. What the iterator raises is raised here, after the
    batches before it and with the traceback of where it happened. Close it, or use `with`.

    >>> batch = Batch(torch.zeros(1, 2), torch.zeros(1, 2), row=7, epoch=0)
    >>> with Prefetcher(iter([batch]), torch.device("cpu")) as batches:
    ...     [batch.row for batch in batches]
    [7]

    Taught in chapter 04_prefetching.
    """

    def __init__(
        self,
        iterator: Iterator[Batch],
        device: torch.device,
        depth: int = 2,
        *,
        travel: Staging | Direct | None = None,
    ) -> None:
        self.stall_seconds = 0.0
        self._iterator, self._depth = iterator, depth
        self._mover: Any = travel or mover(device)
        self._ready: deque[Any] = deque()
        self._change = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._iterator:
                sent = self._mover.send(batch)
                with self._change:
                    self._change.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(sent)
                    self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        with self._change:
            self._change.wait_for(lambda: self._closed or self._ended or self._ready)
            self.stall_seconds += time.perf_counter() - began
            if self._closed or not self._ready:
                error, self._error = self._error, None
                raise error if error is not None and not self._closed else StopIteration
            sent = self._ready.popleft()
            self._change.notify_all()
        return self._mover.receive(sent)

    def close(self) -> None:
        """Stop reading and join the thread, whatever it is waiting for; calling it again does nothing."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join(CLOSING)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
