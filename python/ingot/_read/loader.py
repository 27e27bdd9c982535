"""Tensors, or rows of them, that are read in the background. Each is returned once."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, Unpack

from ingot._base.keys import select
from ingot._base.options import checked, takes
from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint, Wrap
from ingot.errors import OptionError, SafetensorError, SliceError, TensorNotFoundError
from ingot.typing import NoOptions

from .load import Value
from .moves import Moving, landing, moved

if TYPE_CHECKING:
    from ingot._base.keys import Selector

# The rows of each tensor, in the order of reading; None for all rows.
Rows = dict[str, slice | None]

# The default for bytes that are read ahead: several of the largest common tensors, but few compared to a
# model.
AHEAD = 256 << 20


class PrefetchLoader(Generic[Value]):
    """Tensors of an open file, read in the background. `safe_open.prefetch` makes them.

    Each tensor is returned once, by `take` or by iteration over pairs of name and tensor, as soon as it is
    read: in the order of an iterable of `keys`, else of the file. A tensor that is taken out of order is read
    next, regardless of the limit. An exception about one tensor does not end the loader.

    It stops reading and frees the remaining tensors when it is closed, when it is dropped, and at the end
    of a ``with``. It outlives its handle, and may be used from many threads at once.

    Examples
    --------
    >>> with ingot.open("model.safetensors") as file:
    ...     for name, tensor in file.prefetch(keys=["wte", "lm_head.weight"]):
    ...         print(name, tensor.shape)
    wte (8, 4)
    lm_head.weight (8, 4)
    """

    __slots__ = ("__weakref__", "_checkpoint", "_move", "_planned", "_stream", "_wrap")

    def __init__(
        self, checkpoint: Checkpoint, rows: Rows, wrap: Wrap, move: Moving, ahead: int, threads: int | None
    ) -> None:
        self._checkpoint = checkpoint
        self._wrap = wrap
        self._move = move
        self._planned = rows
        onto = landing(checkpoint, rows, move)
        self._stream = checkpoint.stream([*rows.items()], ahead, threads, onto=onto)
        if checkpoint.backend == "object":
            from .source import close_at_exit

            close_at_exit(self)

    def names(self) -> list[str]:
        """Return the names of the tensors that it was made for, in their order.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file, file.prefetch({"wte": None}) as loader:
        ...     print(loader.names())
        ['wte']
        """
        return [*self._planned]

    @takes()
    def take(self, name: str, **options: Unpack[NoOptions]) -> Value:
        """Return one tensor when it has been read.

        Parameters
        ----------
        name : str
            A tensor of the plan.

        Returns
        -------
        array or tensor of the framework
            The tensor as `safe_open.get_tensor` returns it, or its rows as `TensorSlice` returns them.

        Raises
        ------
        TensorNotFoundError
            The plan does not contain it.
        SafetensorError
            It was returned before (``code`` is ``"taken"``).
        DtypeError, StorageError
            As `safe_open.get_tensor` does.
        ClosedError
            The loader is closed.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file, file.prefetch({"wte": slice(0, 2)}) as loader:
        ...     print(loader.take("wte").tolist())
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
        """
        if options or type(name) is not str:
            checked(PrefetchLoader.take, {"name": name, **options})
        if name not in self._planned:
            # A method of a closed checkpoint raises `ClosedError`.
            len(self._checkpoint)
            message = f"tensor {_quoted(name)} is not in the plan of this loader"
            raise TensorNotFoundError(message, code="unknown-tensor", tensor=name)
        tensor = self._stream.take(name, self._wrap)
        if tensor is None:
            message = f"tensor {_quoted(name)} was taken before: a loader returns each tensor once"
            raise SafetensorError(message, code="taken", tensor=name)
        found: Value = moved(self._checkpoint, name, tensor, self._move)
        return found

    def close(self) -> None:
        """Stop reading, and free the remaining tensors. May be called more than once.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     loader = file.prefetch()
        >>> wte = loader.take("wte")
        >>> loader.close()
        >>> wte.shape
        (8, 4)
        """
        self._stream.close()
        self._checkpoint.close()

    def __iter__(self) -> TensorStream[Value]:
        return TensorStream(self)

    def __len__(self) -> int:
        return len(self._planned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._checkpoint.closed else f"{len(self)} tensors"
        return f"<ingot.PrefetchLoader {_escaped(self._checkpoint.path or '')}: {state}>"

    def __reduce__(self) -> Any:
        way_out = "pickle the handle (ingot.safe_open) and call prefetch after unpickling"
        raise TypeError(
            f"a PrefetchLoader cannot be pickled, since its threads read in this process: {way_out}"
        )

    def _next(self) -> tuple[str, Value]:
        """Return the next pair that was not taken by name."""
        found = self._stream.next(self._wrap)
        if found is None:
            raise StopIteration
        name, tensor = found
        return name, moved(self._checkpoint, name, tensor, self._move)


class TensorStream(Generic[Value]):
    """The pairs of a `PrefetchLoader` that were not taken by name."""

    __slots__ = ("_loader",)

    def __init__(self, loader: PrefetchLoader[Value]) -> None:
        self._loader = loader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Value]:
        return self._loader._next()

    def __reduce__(self) -> Any:
        return self._loader.__reduce__()


def planned(
    checkpoint: Checkpoint,
    plan: Mapping[str, slice | None] | None,
    keys: Selector | None,
    drop: Selector | None,
) -> Rows:
    """Return the tensors of `plan`, or those that `keys` and `drop` select, with the rows of each."""
    if plan is None:
        return dict.fromkeys(select(checkpoint, keys, drop))
    if keys is not None or drop is not None:
        message = "prefetch() takes a plan, which names its tensors, or keys and drop: found both"
        raise OptionError(message, code="plan-and-keys")
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a dict of str to slice or None, found {type(plan).__name__}")
    rows = {name: _rows(checkpoint, name, one) for name, one in plan.items()}
    return {name: rows[name] for name in checkpoint.all_names() if name in rows}


def _rows(checkpoint: Checkpoint, name: str, rows: object) -> slice | None:
    """Return `rows`, which must be within the tensor, since a plan for another shape is a mistake."""
    shape = checkpoint.info(name).shape
    if rows is None:
        return None
    if not isinstance(rows, slice) or not all(
        one is None or hasattr(one, "__index__") for one in (rows.start, rows.stop, rows.step)
    ):
        raise TypeError(f"tensor {_quoted(name)}: plan needs None or a slice of ints, found {rows!r}")
    if not shape:
        raise _misfit(checkpoint, name, "rows of a tensor with a dimension", "a scalar")
    for bound in (rows.start, rows.stop):
        if bound is not None and not -shape[0] <= index(bound) <= shape[0]:
            raise _misfit(checkpoint, name, f"bounds within its {shape[0]} rows", str(bound))
    if rows.step is not None and index(rows.step) != 1:
        raise _misfit(checkpoint, name, "a step of 1", str(rows.step))
    start, stop, _ = rows.indices(shape[0])
    return slice(start, stop)


def _misfit(checkpoint: Checkpoint, name: str, expected: str, found: str) -> SliceError:
    reason = f"plan: expected {expected}, found {found}"
    return located(
        SliceError,
        reason,
        code="invalid-plan",
        path=checkpoint.path,
        tensor=name,
        expected=expected,
        found=found,
    )
