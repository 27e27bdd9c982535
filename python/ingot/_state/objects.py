"""The elements of a tree of state: paths, live objects, tensors, and classes of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from sys import modules
from typing import Any, TypeAlias

from ingot._base.frameworks import owner

#: The keys, indices and names of fields that lead from the root of a tree to a value.
TreePath: TypeAlias = tuple[Any, ...]

#: Values within values. Deeper trees are cycles or attacks.
MAX_DEPTH = 100


def spelled(path: TreePath) -> str:
    """Return a path as messages show it, such as ``optimizer.state[3].hook``."""
    parts = (f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in path)
    return "".join(parts).removeprefix(".")


def is_live(value: Any) -> bool:
    """Return whether `value` saves and loads its state by methods of its own."""
    if value is None or isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor or an array of a framework, and no scalar of NumPy."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    numpy = modules.get("numpy")
    return owner(value) is not None and (numpy is None or not isinstance(value, numpy.generic))


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or a named tuple. None for other values."""
    if isinstance(value, type):
        return None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else dict(zip(names, value, strict=True))
    if not is_dataclass(value):
        return None
    return {one.name: getattr(value, one.name) for one in fields(value) if not is_static(one)}


def is_static(field: Field[Any]) -> bool:
    """Return whether flax declares a field, such as a function, to be no part of a tree."""
    return not field.metadata.get("pytree_node", True)


#: Values that contain no others. Trees have lists of millions of them.
LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes))


def within(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield the values of a tree with their paths, without numbers and texts.

    Live objects and tensors are not looked into.
    """
    yield from _within(tree, path, set())


def _within(tree: Any, path: TreePath, leaves: set[type]) -> Iterator[tuple[TreePath, Any]]:
    """Yield the values of a tree. `leaves` are classes of tensors, of which a tree may have many."""
    yield path, tree
    for step, value in _items(tree, path, leaves):
        kind = type(value)
        if kind in leaves:
            yield (*path, step), value
        elif kind not in LEAVES:
            yield from _within(value, (*path, step), leaves)


def lives_in(tree: Any) -> dict[TreePath, Any]:
    """Return the live objects of a tree by their paths."""
    return dict(_lives(tree, (), set(LEAVES)))


def _lives(tree: Any, path: TreePath, leaves: set[type]) -> Iterator[tuple[TreePath, Any]]:
    if is_live(tree):
        yield path, tree
        return
    for step, value in _items(tree, path, leaves):
        # A tree may have many tensors, so they get no path.
        if type(value) not in leaves:
            yield from _lives(value, (*path, step), leaves)


def _items(tree: Any, path: TreePath, leaves: set[type]) -> Iterable[tuple[Any, Any]]:
    """Return the values directly in a value, with their steps. Adds the class of a tensor to `leaves`."""
    if is_live(tree) or len(path) >= MAX_DEPTH:
        return ()
    inner = fields_of(tree)
    if inner is not None:
        return inner.items()
    if is_tensor(tree):
        leaves.add(type(tree))
    elif isinstance(tree, Mapping):
        return tree.items()
    elif isinstance(tree, list | tuple):
        return enumerate(tree)
    return ()
