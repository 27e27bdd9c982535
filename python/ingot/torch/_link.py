"""Copy between the host and a device by torch: through pinned memory, in the order of streams.

The calls are the same for every accelerator of torch: CUDA, ROCm, XPU, MTIA, and those of extensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Self

import torch

# Pieces of a ring: one is filled while the other is copied.
RING = 2


class Link:
    """A device to which copies run while the host continues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The stream for deferred copies to the host.
        self._stream: torch.Stream | None = None

    def memory(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory. Raises `RuntimeError` if no more memory can be pinned."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Queue a copy on the device's current stream."""
        into.copy_(values, non_blocking=True)

    def mark(self) -> Any:
        """Return an event to wait for the work queued on the device's current stream so far."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    @contextmanager
    def aside(self, since: Any) -> Iterator[None]:
        """Enter another stream that waits for the event `since` and for no later work."""
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        with self._stream:
            self._stream.wait_event(since)
            yield

    def pull(self, since: Any, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `values` in host memory, as work queued before `since` leaves it.

        The copy is complete on return. The tensor must be contiguous.
        """
        with self.aside(since):
            packed = values()
            try:
                found = self.memory(packed.nbytes).view(packed.dtype).view(packed.shape)
            except RuntimeError:
                # No more memory can be pinned. This copy is done when it returns.
                return packed.cpu()
            self.copy(found, packed)
            self.mark().synchronize()
        return found


@cache
def link(device: torch.device) -> Link | None:
    """Return the link to `device`, or None if torch lacks pinned memory or streams for it."""
    # On MPS, pinned memory and streams bring nothing, since its memory is the host's.
    if device.type in ("cpu", "meta", "mps") or not _is_the_accelerator(device):
        return None
    found = Link(device)
    try:
        found.memory(1)
        found.mark().synchronize()
    except (RuntimeError, TypeError, ValueError):
        # Backends without one of them raise `NotImplementedError`, which is a `RuntimeError`.
        return None
    return found


def _is_the_accelerator(device: torch.device) -> bool:
    """Return whether torch's functions for accelerators cover devices of this type."""
    # Older releases of torch have no such function.
    accelerator = getattr(torch, "accelerator", None)
    current = None if accelerator is None else accelerator.current_accelerator()
    return current is not None and current.type == device.type


class Ring:
    """Host memory through which tensors are copied to a device. A piece is reused when its copies are done.

    At the end of a ``with`` block all copies are done, and the memory is returned to torch, which caches some
    pinned memory for later requests. Without a link with streams there is one piece, which is not pinned.
    """

    def __init__(self, way: Link | None, nbytes: int) -> None:
        self._way = way
        self._nbytes = nbytes
        # The pieces in the order of use, each with an event for the copies queued by then.
        self._used: deque[tuple[torch.Tensor, Any]] = deque()

    def take(self) -> torch.Tensor:
        """Return a piece of memory that no copy reads any more."""
        if len(self._used) < (1 if self._way is None else RING):
            fresh = self._fresh()
            if fresh is not None:
                return fresh
        piece, queued = self._used.popleft()
        if queued is not None:
            queued.synchronize()
        return piece

    def _fresh(self) -> torch.Tensor | None:
        if self._way is not None:
            try:
                return self._way.memory(self._nbytes)
            except RuntimeError:
                # No more memory can be pinned. A load never fails for that.
                if self._used:
                    return None
                self._way = None
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copy from a piece that was taken."""
        if self._way is None:
            into.copy_(values)
        else:
            self._way.copy(into, values)

    def put(self, piece: torch.Tensor) -> None:
        """Return a piece for reuse, while copies from it may still run."""
        self._used.append((piece, None if self._way is None else self._way.mark()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._way is not None:
            # Wait for all pieces, even those that were not returned. The first error is raised.
            with suppress(*() if error is None else (RuntimeError,)):
                self._way.mark().synchronize()
        self._used.clear()
