"""Streams, events and pinned memory that guarantee only what torch documents.

A copy overwrites its destination with wrong bytes at once. It copies the right ones when the program waits
for it, or earlier, as the seed decides. Freed pinned memory is overwritten. So a program that uses memory too
early reads wrong bytes, even if a real device would have been fast enough.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from ingot.torch._link import Link

from . import far

_SPOILT, _GONE = 0xDB, 0xEE


class Event:
    """The operations queued when it was recorded."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.is_done = False

    def synchronize(self) -> None:
        self._streams.waits += 1
        self._streams.run(self)


class Streams(Link):
    """A device with two streams: the current stream of callers, and a second one for copies."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("far", 0))
        self._random = Random(seed)
        self._queues: list[deque[Callable[[], bool]]] = [deque(), deque()]
        self._lock = threading.RLock()
        self._own = threading.local()
        #: The pinned bytes now and at most, and the number of times that the host waited.
        self.pinned = self.most_pinned = self.waits = 0
        #: The number of bytes that can still be pinned.
        self.room: int | None = None

    def memory(self, nbytes: int) -> torch.Tensor:
        if self.room is not None and self.pinned + nbytes > self.room:
            raise RuntimeError("no more memory can be pinned")
        real = (ctypes.c_char * max(nbytes, 1))()
        # torch keeps this as long as the tensor. The memory itself stays, for late copies.
        lent = (ctypes.c_char * max(nbytes, 1)).from_address(ctypes.addressof(real))
        self.pinned += nbytes
        self.most_pinned = max(self.most_pinned, self.pinned)
        weakref.finalize(lent, self._free, real, nbytes)
        return torch.frombuffer(lent, dtype=torch.uint8)[:nbytes]

    def _free(self, real: Any, nbytes: int) -> None:
        ctypes.memset(real, _GONE, len(real))
        self.pinned -= nbytes
        # Never freed, since the allocator would reuse the memory.
        _freed.append(real)

    def copy(self, into: torch.Tensor, values: torch.Tensor) -> None:
        destination, source = far.host(into), far.host(values)
        assert destination.shape == source.shape
        assert destination.dtype == source.dtype
        destination.view(torch.uint8).fill_(_SPOILT) if destination.ndim else destination.fill_(0)
        # Addresses, not tensors: a copy keeps no memory alive.
        keep = _shadow(destination), _shadow(source)
        self.later(lambda: keep[0].copy_(keep[1]))

    def later(self, work: Callable[[], object]) -> None:
        """Queue work on the current stream, such as a kernel of the caller's."""

        def do() -> bool:
            work()
            return True

        self._queue(do)

    def mark(self) -> Event:
        event = Event(self)

        def record() -> bool:
            event.is_done = True
            return True

        self._queue(record)
        return event

    @contextmanager
    def aside(self, since: Event) -> Iterator[None]:
        self._own.stream = 1
        try:
            self._queue(lambda: since.is_done)
            yield
        finally:
            self._own.stream = 0

    def _queue(self, item: Callable[[], bool]) -> None:
        with self._lock:
            self._queues[getattr(self._own, "stream", 0)].append(item)
            for _ in range(self._random.choice((0, 0, 1, 3))):
                self._step()

    def _step(self) -> bool:
        """Run the next operation of some stream. Return False if every stream waits or is empty."""
        for number in self._random.sample(range(2), 2):
            queue = self._queues[number]
            if queue and queue[0]():
                queue.popleft()
                return True
        return False

    def run(self, event: Event) -> None:
        """Run queued operations in an allowed order until `event` is done."""
        with self._lock:
            while not event.is_done:
                assert self._step(), "an event that is never recorded is waited for"

    def finish(self) -> None:
        """Run the operations that the caller's next operation would wait for."""
        self.run(self.mark())


_freed: list[Any] = []


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that does not keep the memory alive."""
    if not tensor.numel():
        return tensor
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (elements * tensor.itemsize)).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
