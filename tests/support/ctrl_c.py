"""Ctrl-C while a server stalls."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .servers import Handler, Request, Server, serving


@contextmanager
def stalling(data: bytes) -> Iterator[Server]:
    """Serve the start of a file, and have every other request wait until this ends."""
    over = threading.Event()

    def answer(handler: Handler, request: Request) -> None:
        if request.range[0] == 0:
            handler.part(data, request, ETag='"v1"')
        else:
            over.wait(30)

    with serving(answer) as server:
        try:
            yield server
        finally:
            over.set()


@contextmanager
def interrupted() -> Iterator[None]:
    """Check that the block ends by a Ctrl-C after half a second."""
    with pytest.raises(KeyboardInterrupt), interrupting():
        yield


@contextmanager
def interrupting() -> Iterator[None]:
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
