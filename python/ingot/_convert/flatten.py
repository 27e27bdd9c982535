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
# Values in all. A few bytes of pickle can name one list in another, and that one in the next, many times
# each: what they stand for grows by powers.
MAX_VALUES = 1_000_000


def flatten(path: str, tree: Any, is_tensor: Callable[[Any], bool]) -> tuple[dict[str, Any], list[LeftOut]]:
    """The tensors of `tree` by name, and what is none. A dict or list without any is left out as one."""
    walk = _Walk(path, is_tensor)
    tensors: dict[str, Any] = {}
    others: list[LeftOut] = []
    for count, (name, value) in enumerate(walk.leaves("", tree, 0)):
        if count >= MAX_VALUES:
            raise refused(
                path,
                f"holds more than {MAX_VALUES:,} values, which is the limit",
                code="too-many-values",
                expected=MAX_VALUES,
            )
        name = name or LONE
        if not is_tensor(value):
            others.append(left_out(name, value))
            continue
        if name in tensors:
            raise twice(path, name)
        tensors[name] = value
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
        # By identity: of a list that stands in many places, each has the same answer.
        self._known: dict[int, bool] = {}

    def leaves(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if self._is_tensor(value) or not self._has_tensors(value, depth):
            yield name, value
            return
        for key, inner in self._items(name, value):
            yield from self.leaves(f"{name}.{key}" if name else key, inner, depth + 1)

    def _has_tensors(self, value: Any, depth: int) -> bool:
        if self._is_tensor(value):
            return True
        inner = value.values() if hasattr(value, "values") else value
        if not isinstance(value, (list, tuple)) and not hasattr(value, "items"):
            return False
        if depth > MAX_DEPTH:
            raise refused(
                self._path,
                f"dicts and lists stand in each other more than {MAX_DEPTH} levels deep, which is the limit",
                code="too-deep",
                expected=MAX_DEPTH,
            )
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = any(self._has_tensors(one, depth + 1) for one in inner)
        return known

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
