"""Run saves in the background, one after another."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

from ingot._base.text import _escaped
from ingot._base.waits import settled

from .failures import Outcome, record, warn

T = TypeVar("T")
F = TypeVar("F", bound="Future[Any]")


class ObservedFuture(Future[None]):
    """A future that records whether the program has asked for its result."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def result(self, timeout: float | None = None) -> None:
        return self._asked(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._asked(super().exception, timeout)

    def _asked(self, wait: Callable[[float | None], T], timeout: float | None) -> T:
        try:
            if timeout is None:
                settled(self)
            return wait(timeout)
        finally:
            self._outcome.is_asked |= self.done()


class SaveFuture(ObservedFuture):
    """The future of a background save: the result of ``save_file(..., background=True)``.

    Its result is None.

    Attributes
    ----------
    staged : concurrent.futures.Future
        Done when the tensors may change: at once if `snapshot` copied them, else when all bytes are written,
        before the file is flushed and renamed. Its result is None. If the save fails or is cancelled before,
        it raises the same error.

    Examples
    --------
    >>> arrays = {"bias": numpy.ones(4)}
    >>> saving = ingot.numpy.save_file(arrays, "bias.safetensors", background=True)
    >>> saving.staged.result()
    >>> arrays["bias"][:] = 0  # the file has the ones
    >>> saving.result()
    >>> ingot.numpy.load_file("bias.safetensors")["bias"].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, path: str = "") -> None:
        super().__init__(Outcome())
        self._path = path
        # `Line._disown` calls this again in a child after a fork, whose program may hold both futures.
        staged: ObservedFuture = self.__dict__.get("staged") or ObservedFuture(self._outcome)
        ObservedFuture.__init__(staged, self._outcome)
        self.staged: Future[None] = staged
        # It is not queued, so it cannot be cancelled.
        self.staged.set_running_or_notify_cancel()
        self.add_done_callback(_end_staging)

    def __reduce__(self) -> Any:
        way_out = "call its result() here and pickle the path"
        raise TypeError(f"a SaveFuture cannot be pickled, since the save runs in this process: {way_out}")

    def _stage(self) -> None:
        """Mark the save as staged: the tensors may change."""
        if not self.staged.done():
            self.staged.set_result(None)


class SharedSaveFuture(SaveFuture):
    """The future of a save by several ranks. It cannot be cancelled, since the other ranks would wait."""

    def cancel(self) -> bool:
        """Return False: it cannot be cancelled."""
        return False


def _end_staging(future: Future[None]) -> None:
    assert isinstance(future, SaveFuture)
    fault = CancelledError() if future.cancelled() else Future.exception(future)
    if fault is None:
        future._stage()
        return
    if not future.cancelled():
        record(future._outcome, _described(future._path, fault))
    if not future.staged.done():
        future.staged.set_exception(fault)


def _described(path: str, fault: BaseException) -> str:
    """Return the error in one line, with the path."""
    text = f"{type(fault).__name__}: {fault}"
    return text if _escaped(path) in text else f"{_escaped(path)}: {text}"


class Line:
    """A queue of calls, which run in order on one thread. The thread exists only while there are calls.

    The interpreter waits for the thread at exit. If it no longer waits for new threads, `put` runs the call
    itself. In a child after a fork there is no such thread: the calls continue in the parent, and the child's
    futures raise.
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
        # Reentrant, since a signal handler may save while `put` runs.
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: Future[Any] | None = None
        # The thread that runs the calls. Any other started thread ends without running one.
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], T], future: F) -> F:
        """Queue `call`. `future`, which is returned, gets its result or its exception."""
        warn()
        turn = (future, call)
        try:
            with self._lock:
                self._waiting.append(turn)
                is_nobodys = self._thread is None and not self._starts_thread()
            if is_nobodys:
                self._run_here()
            elif _exits() and self._thread is not threading.current_thread():
                # The running thread may be a daemon, which is killed at exit.
                settled(future)
        except BaseException:
            # After Ctrl-C the caller has no future, so the call is dropped unless it has begun.
            with self._lock, suppress(ValueError):
                self._waiting.remove(turn)
            raise
        return future

    def _starts_thread(self) -> bool:
        """Start the thread, and return whether it runs."""
        if _exits():
            return False
        thread = threading.Thread(target=self._run, name=self._name, daemon=False)
        try:
            thread.start()
        except RuntimeError:
            return False
        # Set after `start`, which Ctrl-C may interrupt before the thread exists.
        self._thread = thread
        return True

    def _run_here(self) -> None:
        own = threading.current_thread()
        try:
            self._thread = own
            self._run()
        finally:
            with self._lock:
                if self._thread is own:
                    self._thread = self._running = None

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._lock:
                if self._thread is not own:
                    return
                if not self._waiting:
                    self._thread = None
                    return
                self._running, call = self._waiting.popleft()
            _settle(self._running, call)
            self._running = None
            # The references of this call are released before the next one runs.
            del call

    def _disown(self) -> None:
        orphans = [future for future, _ in self._waiting]
        if self._running is not None:
            orphans.append(self._running)
        self._reset()
        for future in orphans:
            # A thread of the parent may hold the old lock.
            future.__init__()  # type: ignore[misc]
            if isinstance(future, SaveFuture):
                # The save may succeed in the parent, which reports it.
                future._outcome.is_asked = True
            fault = RuntimeError("this process was forked while the file was saved by its parent")
            future.set_exception(fault)


def _exits() -> bool:
    """Return whether the interpreter is about to exit and no longer waits for new threads."""
    main = threading.main_thread()
    if not main.is_alive():
        return True
    if sys.version_info >= (3, 12):
        # The interpreter also starts no more threads, and raises instead.
        return False
    # Python 3.11 only reports the shutdown to programs that had imported `threading` before. A callback at
    # exit, such as a function passed to `atexit`, is alone on the stack; all other code is above the
    # program's frame. If the stack does not show it, as in a program that embeds Python, the file is saved
    # before `put` returns, so that it is not lost.
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or not _is_program(frame)


def _is_program(frame: FrameType) -> bool:
    """Return whether this frame is the program: a script, a command, or a module run by ``-m``."""
    name = frame.f_code.co_name
    is_main = name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    return is_main or name == "_run_module_as_main"


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as fault:
        future.set_exception(fault)
    else:
        future.set_result(result)


# Saves run one after another: after two saves to one path, in any spelling, the path has the later one.
SAVES = Line("ingot-background")
