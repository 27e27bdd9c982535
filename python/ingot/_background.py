"""Work that goes on while the program does, one piece after another."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future
from typing import TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

T = TypeVar("T")


class Line:
    """Calls functions in the order in which they came, on one thread that is there only while there are some.

    The thread is none of those that an interpreter leaves behind when it exits. In a child after a fork there
    is no such thread: what waited goes on in the parent, and the child's futures say so.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._disown,
            )

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # Those that wait, and the one that runs, which is the first.
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def put(self, call: Callable[[], T]) -> Future[T]:
        """Take `call` on. Its result, or what it raises, is that of the future."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, call))
            if len(self._waiting) > 1:
                return future
        try:
            threading.Thread(target=self._run, name=self._name, daemon=False).start()
        except RuntimeError:
            # The interpreter is about to exit, or there can be no more threads.
            self._run()
        return future

    def _run(self) -> None:
        while True:
            # Looked at and not taken, so that `put` sees that there is a thread.
            future, call = self._waiting[0]
            _settle(future, call)
            # What the call holds shall not wait for the next one.
            del future, call
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _disown(self) -> None:
        orphans = [future for future, _ in self._waiting]
        self._reset()
        for future in orphans:
            # A thread that is not here may have held its lock.
            future.__init__()  # type: ignore[misc]
            future.set_exception(
                RuntimeError("this process was forked while the file was saved by its parent")
            )


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as fault:
        future.set_exception(fault)
    else:
        future.set_result(result)


# One after another, so that of two saves to one path the later is what stays, however the path is spelt.
SAVES = Line("ingot-background")
