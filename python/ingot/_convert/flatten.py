"""Flatten nested dicts and lists to one level of names.

The rule: keys and positions from the top down, joined by dots. ``{"model": {"layers": [w, b]}}`` becomes
``model.layers.0`` and ``model.layers.1``. Keys are str, or ints in decimal; an empty one is a name like any
other, so that ``{"": {"a": w}}`` becomes ``.a``. A tensor without a key, which is all that a file holds, is
called ``tensor``. A tensor below any other key cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot._base.text import _quoted

from .limits import RECORD_NBYTES, VALUE_NBYTES
from .report import LeftOut, Placeholder, Plain, Unusable, left_out

if TYPE_CHECKING:
    from .source import Contents, Entry

LONE = "tensor"
# The deepest nesting of dicts and lists. Real files have fewer than ten levels.
MAX_DEPTH = 64
# The most bits of a key that is a number. Python refuses to format longer ones.
_MAX_KEY_BITS = 128
# Bytes of a character of a name, which Python holds once and a header twice.
_CHARACTER_NBYTES = 4


def flatten(
    contents: Contents,
    tree: Any,
    is_tensor: Callable[[Any], bool],
    make: Callable[[str, Any], Entry],
    below: tuple[str, ...] = (),
) -> None:
    """Add the entries that `make` returns for the tensors of `tree`, and leave out the other values.

    A dict or list without tensors is reported as one value that was left out. `below` begins every name.
    """
    objects = _Objects(contents, lambda value: isinstance(value, Unusable) or is_tensor(value))

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Unusable) or is_tensor(value) or objects.contain_tensors(value)

    def found(name: str, value: Any) -> Entry | LeftOut:
        if isinstance(value, Unusable) or (isinstance(value, Placeholder) and is_leaf(value)):
            raise value.fault(contents.path, name)
        return make(name, value) if is_tensor(value) else left_out(name, value)

    walk = _Walk(contents, is_leaf)
    # A few bytes of a pickle can name one list in another, and that one in the next, several times each: the
    # number of names grows exponentially. So the tree is weighed first, each list once.
    weight = walk.weight(tree, 0).nbytes
    contents.budget.hold(weight)
    contents.budget.hold(-weight)
    for keys, value in walk.leaves(below, tree):
        name = ".".join(keys) if keys else LONE
        contents.add(name, found, name, value)


class _Objects:
    """The placeholders of a tree, which may refer to each other in circles."""

    def __init__(self, contents: Contents, is_tensor: Callable[[Any], bool]) -> None:
        self._contents, self._is_tensor = contents, is_tensor
        self._without: set[int] = set()

    def contain_tensors(self, value: Any) -> bool:
        """Return whether it is a placeholder that holds a tensor with dimensions, however deep.

        A tensor without dimensions counts as a plain value, which may be left out with its object.
        """
        if not isinstance(value, Placeholder):
            return False
        seen, waiting = {id(value)}, [value.held]
        while waiting:
            for one in waiting.pop():
                if id(one) in seen or id(one) in self._without:
                    continue
                if self._is_tensor(one):
                    if getattr(one, "shape", None) != ():
                        return True
                    continue
                if inner := _held(one):
                    self._contents.budget.hold(VALUE_NBYTES * (1 + len(inner)))
                    seen.add(id(one))
                    waiting.append(inner)
        # None of the values in `seen`, or in these, is such a tensor.
        self._without |= seen
        return False


def _held(value: Any) -> list[Any]:
    """Return the values in a container or a placeholder."""
    if isinstance(value, Placeholder):
        return value.held
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (list, tuple, set, frozenset)) else []


class _Weight(NamedTuple):
    """The cost of a value, the same wherever it occurs."""

    nbytes: int = RECORD_NBYTES
    """The bytes of the records of all leaves, with their names from here on."""
    leaves: int = 1
    height: int = 0
    has_tensors: bool = False


class _Walk:
    def __init__(self, contents: Contents, is_tensor: Callable[[Any], bool]) -> None:
        self._contents = contents
        self._is_tensor = is_tensor
        # By identity, since a list that occurs many times is weighed once.
        self._weights: dict[int, _Weight] = {}

    def weight(self, value: Any, depth: int) -> _Weight:
        if self._is_tensor(value):
            return _Weight(has_tensors=True)
        if not isinstance(value, (list, tuple)) and not hasattr(value, "items"):
            return _Weight()
        known = self._weights.get(id(value))
        # A list that contains itself is met again and again before its weight is known.
        if depth + (0 if known is None else known.height) > MAX_DEPTH:
            reason = f"dicts and lists are nested more than {MAX_DEPTH} levels deep, which is the limit"
            raise self._contents.refusal(reason, "too-deep", expected=MAX_DEPTH)
        if known is None:
            known = self._weights[id(value)] = self._sum(value, depth)
        return known

    def _sum(self, value: Any, depth: int) -> _Weight:
        nbytes, leaves, height, has_tensors = 0, 0, 0, False
        for key, inner in _items(value):
            one = self.weight(inner, depth + 1)
            # Keys that are not text are short, or are rejected.
            length = len(_text(key) or "") if isinstance(key, (str, Plain)) else 1
            nbytes += one.nbytes + one.leaves * (length + 1) * _CHARACTER_NBYTES
            leaves += one.leaves
            height = max(height, one.height + 1)
            has_tensors = has_tensors or one.has_tensors
        return _Weight(nbytes, leaves, height, True) if has_tensors else _Weight(height=height)

    def _has_tensors(self, value: Any) -> bool:
        known = self._weights.get(id(value))
        return self._is_tensor(value) or (known is not None and known.has_tensors)

    def leaves(self, keys: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield tensors, and dicts and lists without tensors, each with its path of keys."""
        if self._is_tensor(value) or not self._has_tensors(value):
            yield keys, value
            return
        for key, inner in _items(value):
            if (text := _text(key)) is not None:
                yield from self.leaves((*keys, text), inner)
                continue
            # Without the key, which may be longer than any message.
            kind = type(key).__name__ if not isinstance(key, int) else f"an int of {key.bit_length()} bits"
            word = repr(key) if key is None or isinstance(key, float) else kind
            if self._has_tensors(inner):
                where = _quoted(".".join(keys)) if keys else "the top level"
                reason = f"a key at {where}: expected str or int, found {kind} — drop=[…] leaves it out"
                inner = Unusable(reason, "key", type(key).__name__)
            yield (*keys, f"({word})"), inner


def _text(key: Any) -> str | None:
    """Return a key as a part of a name. A class, which may be a key too, has its own name."""
    if isinstance(key, Plain) and key.kind in ("name", "class"):
        return key.text
    is_name = isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= _MAX_KEY_BITS)
    return str(key) if is_name else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if hasattr(value, "items") else enumerate(value)
