"""Tensors that are read in the background, and files that are brought into the page cache."""

from __future__ import annotations

from . import _open
from .errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Literal, Self

    from ._native import Checkpoint, Wrap
    from ._serialize import Path

    Order = Literal["file", "name"] | Iterable[str]

# Bytes that are read ahead by default: several of the largest tensors that are common, little beside a model.
AHEAD = 256 << 20


class TensorIterator:
    """Pairs of name and tensor, read ahead of whoever takes them. `safe_open.iter_tensors` makes them.

    It ends its thread and frees what was not taken when it is closed, when it is dropped, and at the end of a
    ``with``. An exception about one tensor does not end it: the next call gives the next tensor.
    """

    __slots__ = ("__weakref__", "_checkpoint", "_move", "_stream", "_wrap")

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        wrap: Wrap,
        move: Callable[[Any], Any] | None,
        ahead: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._wrap = wrap
        self._move = move
        self._stream = checkpoint.stream([(name, None) for name in names], ahead)
        if checkpoint.backend == "object":
            from ._objects import close_at_exit

            close_at_exit(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Any]:
        found = self._stream.next(self._wrap)
        if found is None:
            raise StopIteration
        name, tensor = found
        return name, _open.moved(self._checkpoint, name, tensor, self._move)

    def close(self) -> None:
        """Stop reading, and let go of what was not taken. Again is allowed."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def in_order(checkpoint: Checkpoint, order: Order) -> list[str]:
    """The names that `order` stands for."""
    if not isinstance(order, str):
        return list(order)
    if order == "file":
        return checkpoint.offset_names()
    if order == "name":
        return checkpoint.names()
    raise OptionError(
        f"order {order!r} is unknown: expected 'file', 'name' or an iterable of names",
        code="unknown-order",
        expected=("file", "name"),
        found=order,
    )


def checked_ahead(ahead: int) -> int:
    """`ahead`, which must be a number of bytes."""
    if ahead < 0:
        raise OptionError(
            f"ahead {ahead} is negative: expected a number of bytes", code="negative-ahead", found=ahead
        )
    return ahead


def warm(filename: Path) -> int:
    """Bring a file's tensors into the system's page cache, so that what reads them next need not wait.

    It reads in parallel, keeps nothing in memory of its own, and returns when all is there.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        A `.safetensors` or a `.bt` file.

    Returns
    -------
    int
        The bytes of the tensors.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError, StorageError
        As `ingot.safe_open` does, and where reading fails.
    """
    checkpoint = _open.open_checkpoint(filename, "pread")
    try:
        return checkpoint.warm()
    finally:
        checkpoint.close()
