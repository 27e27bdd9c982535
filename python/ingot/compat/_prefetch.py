"""Tensors that are read in the background."""

from __future__ import annotations

from ingot._load import moved
from ingot._open import AHEAD
from ingot._text import _quoted
from ingot.errors import SafetensorError, TensorNotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from ingot._load import Move, Placement
    from ingot._native import Checkpoint, Wrap


class PrefetchLoader:
    """The tensors of one file, read in the background. `safe_open.prefetch` makes them.

    Each tensor is handed out once, by `take` or by iteration. Iteration gives pairs of name and tensor in the
    order of the file, each as soon as it is read. What is read and not handed out is bounded; a tensor that
    is taken out of turn does not wait for room.

    Parameters
    ----------
    checkpoint, wrap, move
        The file, and how its bytes become tensors on a device.
    plan : dict of str to slice or None, optional
        What to read.
    threads : int
        How many threads read. 0 is taken for 1.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        wrap: Wrap,
        move: Move | Placement | None,
        plan: dict[str, slice | None] | None,
        threads: int,
    ) -> None:
        if threads < 0:
            raise OverflowError("threads must not be negative")
        self._checkpoint = checkpoint
        self._wrap = wrap
        self._move = move
        rows = _rows(checkpoint, plan)
        self._names = [name for name in checkpoint.offset_names() if name in rows]
        self._planned = frozenset(self._names)
        requests = [(name, rows[name]) for name in self._names]
        self._stream = checkpoint.stream(requests, AHEAD, max(threads, 1))

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
        if name not in self._planned:
            self._check_open()
            raise TensorNotFoundError(
                f"tensor {_quoted(name)} is not in the plan of this loader",
                code="unknown-tensor",
                tensor=name,
            )
        tensor = self._stream.take(name, self._wrap)
        if tensor is None:
            raise SafetensorError(
                f"tensor {_quoted(name)} was taken before: a loader hands out each tensor once",
                code="taken",
                tensor=name,
            )
        return moved(self._checkpoint, name, tensor, self._move)

    def close(self) -> None:
        """Stop reading, and let go of the tensors that were not handed out. Again is allowed."""
        self._stream.close()
        self._checkpoint.close()

    def __iter__(self) -> TensorStream:
        return TensorStream(self)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        # A method of a closed checkpoint raises what says so.
        len(self._checkpoint)

    def _next(self) -> tuple[str, Any]:
        """The next pair that was not taken by name."""
        found = self._stream.next(self._wrap)
        if found is None:
            raise StopIteration
        name, tensor = found
        return name, moved(self._checkpoint, name, tensor, self._move)


class TensorStream:
    """The pairs of a `PrefetchLoader`."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Any]:
        return self._loader._next()


def _rows(checkpoint: Checkpoint, plan: dict[str, slice | None] | None) -> dict[str, slice | None]:
    """The tensors to read, each with its rows; None for all of them."""
    if plan is None:
        return dict.fromkeys(checkpoint.offset_names())
    if not isinstance(plan, dict):
        raise TypeError(f"{type(plan).__name__!r} object is not an instance of 'dict'")
    return {name: _checked(name, rows, checkpoint.info(name).shape) for name, rows in plan.items()}


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
