"""Tensors that are read ahead in the background."""

from __future__ import annotations

from typing import Generic

from ingot.errors import OptionError

from .load import Value
from .moves import landing, moved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal, Self

    from ingot._native import Checkpoint, Wrap

    from .moves import Move, Placement

    Order = Literal["file", "name"] | Iterable[str]

# Bytes that are read ahead by default: several of the largest tensors that are common, little beside a model.
AHEAD = 256 << 20


class TensorIterator(Generic[Value]):
    """Pairs of name and tensor, read ahead in the background. `safe_open.iter_tensors` gives them.

    It ends its thread and frees what was not taken when it is closed, when it is dropped, and at the end of a
    ``with``. An exception about one tensor does not end it: the next call gives the next tensor.
    """

    __module__ = "ingot"

    __slots__ = ("__weakref__", "_checkpoint", "_move", "_stream", "_wrap")

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        wrap: Wrap,
        move: Move | Placement | None,
        ahead: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._wrap = wrap
        self._move = move
        names = list(names)
        onto = landing(checkpoint, names, move)
        self._stream = checkpoint.stream([(name, None) for name in names], ahead, onto=onto)
        if checkpoint.backend == "object":
            from .source import close_at_exit

            close_at_exit(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Value]:
        found = self._stream.next(self._wrap)
        if found is None:
            raise StopIteration
        name, tensor = found
        return name, moved(self._checkpoint, name, tensor, self._move)

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
