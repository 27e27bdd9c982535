"""Waits without a limit that Ctrl-C ends."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from typing import TypeVar

    T = TypeVar("T")

# The system may deliver a signal to any thread, and only the main thread runs its handler. A wait of the main
# thread therefore ends this often to look for one.
_STEP_SECONDS = 0.05


def wait_for(wait: Callable[[float], object]) -> None:
    """Call `wait` with a number of seconds until it returns true, such as the `wait` of an `Event`."""
    while not wait(_STEP_SECONDS):
        pass


def settled(future: Future[T]) -> Future[T]:
    """Wait until `future` has a result or an error, and return it."""
    if not future.done():
        from concurrent.futures import wait

        wait_for(lambda seconds: wait([future], seconds).done)
    return future
