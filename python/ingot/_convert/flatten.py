"""One level of names for values in nested dicts and lists.

The rule: keys and positions from the top down, joined by dots. ``{"model": {"layers": [w, b]}}`` becomes
``model.layers.0`` and ``model.layers.1``. Keys are str, or ints in decimal; an empty one is a name like any
other, so that ``{"": {"a": w}}`` becomes ``.a``. A tensor below no key, which is all that a file holds, is
called ``tensor``. A tensor below any other key cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot._base.text import _quoted
from ingot.errors import ConversionError

from .limits import RECORD_NBYTES, refused
from .report import LeftOut, Unusable, left_out
from .source import possible

if TYPE_CHECKING:
    from .limits import Budget
    from .source import Entry

LONE = "tensor"
# Levels of dicts and lists. Real ones have fewer than ten.
MAX_DEPTH = 64
# Of a key that is a number. Larger ones are of nobody's making, and Python refuses to write out the largest.
_MAX_KEY_BITS = 128
# What a character of a name takes, which Python has once and a header twice.
_CHARACTER_NBYTES = 4


def flatten(
    path: str,
    tree: Any,
    is_tensor: Callable[[Any], bool],
    make: Callable[[str, Any], Entry],
    budget: Budget,
) -> tuple[list[Entry], list[LeftOut]]:
    """Return the entries that `make` makes of the tensors of `tree`, and the other values.

    A dict or list without tensors is left out as one.
    """

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Unusable) or is_tensor(value)

    def entry(name: str, value: Any) -> Entry:
        if isinstance(value, Unusable):
            raise value.fault(path, name)
        return make(name, value)

    walk = _Walk(path, is_leaf)
    # A few bytes of a pickle can name one list in another, and that one in the next, several times each: what
    # they stand for grows by powers. So it is weighed first, each list once, and paid for before any of it is
    # named.
    budget.hold(walk.weight(tree, 0).nbytes)
    entries: list[Entry] = []
    others: list[LeftOut] = []
    for keys, value in walk.leaves((), tree):
        name = ".".join(keys) if keys else LONE
        if is_leaf(value):
            entries.append(possible(name, entry, name, value))
        else:
            others.append(left_out(name, value))
    return entries, others


def twice(path: str, name: str) -> ConversionError:
    """The refusal of two tensors with one name."""
    return refused(
        path,
        "two tensors would have this name",
        code="duplicate-tensor",
        tensor=name,
    )


class _Weight(NamedTuple):
    """What becomes of a value, wherever it stands."""

    nbytes: int
    """Of the records of all leaves, with their names from here on."""
    leaves: int
    height: int
    has_tensors: bool


_LEAF = _Weight(RECORD_NBYTES, 1, 0, False)
_TENSOR = _Weight(RECORD_NBYTES, 1, 0, True)


class _Walk:
    def __init__(self, path: str, is_tensor: Callable[[Any], bool]) -> None:
        self._path = path
        self._is_tensor = is_tensor
        # By identity: a list that stands in many places is weighed once.
        self._weights: dict[int, _Weight] = {}

    def weight(self, value: Any, depth: int) -> _Weight:
        if self._is_tensor(value):
            return _TENSOR
        if not isinstance(value, (list, tuple)) and not hasattr(value, "items"):
            return _LEAF
        known = self._weights.get(id(value))
        # What stands in itself is met again and again before it is known.
        if depth + (0 if known is None else known.height) > MAX_DEPTH:
            raise refused(
                self._path,
                f"dicts and lists stand in each other more than {MAX_DEPTH} levels deep, which is the limit",
                code="too-deep",
                expected=MAX_DEPTH,
            )
        if known is None:
            known = self._weights[id(value)] = self._sum(value, depth)
        return known

    def _sum(self, value: Any, depth: int) -> _Weight:
        nbytes, leaves, height, has_tensors = 0, 0, 0, False
        for key, inner in _items(value):
            one = self.weight(inner, depth + 1)
            # Keys that are no text are short, or are refused.
            length = len(key) if isinstance(key, str) else 1
            nbytes += one.nbytes + one.leaves * (length + 1) * _CHARACTER_NBYTES
            leaves += one.leaves
            height = max(height, one.height + 1)
            has_tensors = has_tensors or one.has_tensors
        if not has_tensors:
            return _Weight(RECORD_NBYTES, 1, height, False)
        return _Weight(nbytes, leaves, height, True)

    def leaves(self, keys: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield tensors, and dicts and lists that have none, each below its keys."""
        known = self._weights.get(id(value))
        if self._is_tensor(value) or known is None or not known.has_tensors:
            yield keys, value
            return
        for key, inner in _items(value):
            if isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= _MAX_KEY_BITS):
                yield from self.leaves((*keys, str(key)), inner)
            else:
                yield from self._below_odd_key(keys, key, inner)

    def _below_odd_key(
        self, keys: tuple[str, ...], key: Any, value: Any
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the value below a key that is no name. Tensors in it cannot be converted."""
        where = _quoted(".".join(keys)) if keys else "the top level"
        # Without the value: a key may be longer than any message.
        kind = type(key).__name__ if not isinstance(key, int) else f"an int of {key.bit_length()} bits"
        word = repr(key) if key is None or isinstance(key, float) else kind
        known = self._weights.get(id(value))
        if self._is_tensor(value) or (known is not None and known.has_tensors):
            reason = f"a key at {where}: expected str or int, found {kind} — drop=[…] leaves it out"
            value = Unusable(reason, "key", type(key).__name__)
        yield (*keys, f"({word})"), value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if hasattr(value, "items") else enumerate(value)
