"""Tensors that are read in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from ingot._open import _moved
from ingot.errors import ClosedError, SafetensorError, TensorNotFoundError, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    from ingot._native import Archive, Wrap


class PrefetchLoader:
    """The tensors of one file, read in the background. `safe_open.prefetch` makes them.

    Each tensor is handed out once, by `take` or by iteration. Iteration gives pairs of name and tensor, in
    the order in which they are ready.

    Parameters
    ----------
    archive, wrap, move
        The file, and how its bytes become tensors on a device.
    plan : dict of str to slice or None, optional
        What to read.
    threads : int
        How many threads read. 0 is taken for 1.
    """

    def __init__(
        self,
        archive: Archive,
        wrap: Wrap,
        move: Callable[[Any], Any] | None,
        plan: dict[str, slice | None] | None,
        threads: int,
    ) -> None:
        if threads < 0:
            raise OverflowError("threads must not be negative")
        self._archive = archive
        rows = _rows(archive, plan)
        self._names = [name for name in archive.offset_names() if name in rows]
        self._ready: SimpleQueue[str] = SimpleQueue()
        self._lock = threading.Lock()
        # What has not been handed out.
        self._waiting: dict[str, Future[Any]] = {}
        self._closed = False
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="ingot-prefetch")
        for name in self._names:
            future = self._pool.submit(_read, archive, name, rows[name], wrap, move)
            self._waiting[name] = future
            future.add_done_callback(lambda _, name=name: self._ready.put(name))  # type: ignore[misc]
        # No more work comes. The threads end with the last tensor.
        self._pool.shutdown(wait=False)

    def names(self) -> list[str]:
        """Give the names of the tensors that it hands out, in the order of the file."""
        return list(self._names)

    def take(self, name: str) -> Any:
        """Give one tensor, and wait until it is read.

        Raises
        ------
        TensorNotFoundError
            It is not among those that are read.
        SafetensorError
            It was handed out before.
        """
        return self._taken(name).result()

    def close(self) -> None:
        """Stop reading, and let go of the tensors that were not handed out. Again is allowed."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.cancel()
        self._pool.shutdown(wait=True)
        self._archive.close()

    def __iter__(self) -> TensorStream:
        return TensorStream(self)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _taken(self, name: str) -> Future[Any]:
        with self._lock:
            future = self._waiting.pop(name, None)
            closed = self._closed
        if future is not None:
            return future
        if closed:
            raise ClosedError("the loader is closed", code="closed")
        if name in self._names:
            raise SafetensorError(
                f"tensor {_quoted(name)} was taken before: a loader hands out each tensor once",
                code="taken",
                tensor=name,
            )
        raise TensorNotFoundError(
            f"tensor {_quoted(name)} is not in the plan of this loader", code="unknown-tensor", tensor=name
        )

    def _next(self) -> tuple[str, Any]:
        """The next pair that is ready and was not taken by name."""
        while True:
            with self._lock:
                if not self._waiting:
                    raise StopIteration
            name = self._ready.get()
            with self._lock:
                future = self._waiting.pop(name, None)
            if future is not None:
                return name, future.result()


class TensorStream:
    """The pairs of a `PrefetchLoader`, in the order in which they are ready."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Any]:
        return self._loader._next()


def _rows(archive: Archive, plan: dict[str, slice | None] | None) -> dict[str, slice | None]:
    """The tensors to read, each with its rows; None for all of them."""
    if plan is None:
        return dict.fromkeys(archive.offset_names())
    if not isinstance(plan, dict):
        raise TypeError(f"{type(plan).__name__!r} object is not an instance of 'dict'")
    return {name: _checked(name, rows, archive.info(name).shape) for name, rows in plan.items()}


def _checked(name: str, rows: object, shape: tuple[int, ...]) -> slice | None:
    if rows is None:
        return None
    if not isinstance(rows, slice):
        raise _bad_plan(name, f"values must be None or a slice, got {type(rows)} for {name}")
    if rows.step not in (None, 1):
        raise _bad_plan(name, f"slices must have step 1, got {rows.step} for {name}")
    if not shape:
        raise _bad_plan(name, f"asks to slice rows, and cannot slice rows of the 0-d tensor {name}")
    if rows.stop is not None and rows.stop > shape[0]:
        raise _bad_plan(name, f"slice stop {rows.stop} for {name} is out of range for {shape[0]} rows")
    return rows


def _bad_plan(name: str, what: str) -> SafetensorError:
    return SafetensorError(f"prefetch plan {what}", code="invalid-plan", tensor=name)


def _read(
    archive: Archive, name: str, rows: slice | None, wrap: Wrap, move: Callable[[Any], Any] | None
) -> Any:
    part = archive.tensor(name, wrap) if rows is None else archive.select(name, rows, wrap)
    return _moved(archive, name, part, move)
