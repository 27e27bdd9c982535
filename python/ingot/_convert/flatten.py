"""One level of names for values in nested dicts and lists.

The rule: keys and positions from the top down, joined by dots. ``{"model": {"layers": [w, b]}}`` becomes
``model.layers.0`` and ``model.layers.1``. Keys are str, or ints in decimal. A tensor without a name, which is
from .refusal import refused
all that a file holds, is called ``tensor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingot.errors import ConversionError, _quoted

from .refusal import refused
from .source import LeftOut, left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONE = "tensor"
# Levels of dicts and lists. Real ones have fewer than ten.
MAX_DEPTH = 64
# In all. A few bytes of pickle can name one list in another, and that one in the next, several times each:
# what they stand for grows by powers.
MAX_TENSORS = 1_000_000


def flatten(path: str, tree: Any, is_tensor: Callable[[Any], bool]) -> tuple[dict[str, Any], list[LeftOut]]:
    """The tensors of `tree` by name, and what is none. A dict or list without any is left out as one."""
    walk = _Walk(path, is_tensor)
    if walk.count(tree, 0) > MAX_TENSORS:
        raise refused(
            path,
            f"stands for more than {MAX_TENSORS:,} tensors, which is the limit",
            code="too-many-tensors",
            expected=MAX_TENSORS,
        )
    tensors: dict[str, Any] = {}
    others: list[LeftOut] = []
    for name, value in walk.leaves("", tree):
        if not is_tensor(value):
            others.append(left_out(name or LONE, value))
        elif name in tensors:
            raise twice(path, name)
        else:
            tensors[name or LONE] = value
    return tensors, others


def twice(path: str, name: str) -> ConversionError:
    """The refusal of two tensors with one name."""
    return refused(
        path,
        "two tensors would have this name",
        code="duplicate-tensor",
        tensor=name,
    )


class _Walk:
    def __init__(self, path: str, is_tensor: Callable[[Any], bool]) -> None:
        self._path = path
        self._is_tensor = is_tensor
        # By identity: of a list that stands in many places, each has as many.
        self._counts: dict[int, int] = {}

    def count(self, value: Any, depth: int) -> int:
        """How many tensors there are below `value`."""
        if self._is_tensor(value):
            return 1
        if not isinstance(value, (list, tuple)) and not hasattr(value, "items"):
            return 0
        if depth > MAX_DEPTH:
            raise refused(
                self._path,
                f"dicts and lists stand in each other more than {MAX_DEPTH} levels deep, which is the limit",
                code="too-deep",
                expected=MAX_DEPTH,
            )
        known = self._counts.get(id(value))
        if known is None:
            inner = value if isinstance(value, (list, tuple)) else value.values()
            known = self._counts[id(value)] = sum(self.count(one, depth + 1) for one in inner)
        return known

    def leaves(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Tensors, and dicts and lists that have none, each with its name."""
        if self._is_tensor(value) or not self._counts.get(id(value)):
            yield name, value
            return
        for key, inner in self._items(name, value):
            yield from self.leaves(f"{name}.{key}" if name else key, inner)

    def _items(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(value, "items"):
            for position, inner in enumerate(value):
                yield str(position), inner
            return
        for key, inner in value.items():
            if isinstance(key, (str, int)):
                yield str(key), inner
            else:
                where = _quoted(name) if name else "the top level"
                raise refused(
                    self._path,
                    f"a key at {where}: expected str or int, found {type(key).__name__} {_quoted(repr(key))}",
                    code="key",
                    found=type(key).__name__,
                )
