"""Puts trees of state together from JSON. A file never names code to run: FORMAT.md, "Training state"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Flag
from typing import Any

from ingot._base.text import _escaped, _quoted
from ingot._write.states import MAX_NODES
from ingot.errors import CheckpointError, SafetensorError

from .kinds import TOGETHER
from .objects import MAX_DEPTH, TreePath, is_live, is_static, spelled

# The dtypes of stored numbers, with the letters that a `memoryview` has for them.
_LETTERS = {"I64": "q", "F64": "d", "BOOL": "?"}


def fault(
    shown: str, path: TreePath, reason: str, code: str = "invalid-state", **facts: Any
) -> CheckpointError:
    """Return the error for the state at `path` in the tree of the file `shown`."""
    place = spelled(path)
    where = f"{_quoted(place)}: " if place else ""
    return CheckpointError(f"{shown}: {where}{reason}", code=code, tensor=place, **facts)


def unknown_class(shown: str, path: TreePath, what: str, kind: str) -> CheckpointError:
    """Return the error for an object whose class the caller has not passed."""
    reason = f"{what} needs the class {kind}, which a file cannot name: pass it in types=[…]"
    return fault(shown, path, reason, "unknown-class", expected=kind)


class Decoder:
    """Puts a tree together. Methods of a subclass return everything that is not in the JSON.

    Attributes
    ----------
    plain : dict of str to str
        The paths of values that were returned as dicts and other plain values, each with its original type.
    has_own : bool
        Whether the caller has values of its own.
    """

    has_own = True

    def __init__(self, shown: str) -> None:
        self.plain: dict[str, str] = {}
        self.shown = shown
        self._nodes = 0
        # Set within keys of dicts and members of sets.
        self._is_hashed = False

    def tensor(self, name: str, framework: str | None, path: TreePath) -> Any:
        """Return the tensor that is stored as `name`, of the file's framework or of another one."""
        raise NotImplementedError

    def raw(self, name: str, path: TreePath) -> tuple[str, memoryview]:
        """Return the dtype and the bytes of the tensor that the node at `path` names."""
        raise NotImplementedError

    def live(self, value: Any, node: Any, path: TreePath) -> Any:
        """Return a live object of the caller, for which `node` is the state."""
        raise NotImplementedError

    def own(self, path: TreePath) -> Any:
        """Return the caller's value at `path`, or None."""
        raise NotImplementedError

    def class_named(self, name: str, path: TreePath) -> Any:
        """Return the caller's class with this name, or None."""
        raise NotImplementedError

    def flattened(self, kind: Any, inner: dict[str, Any], node: dict[str, Any], path: TreePath) -> Any:
        """Return a tensor of the class `kind`, which is made of the `inner` tensors."""
        raise NotImplementedError

    def value(self, node: Any, path: TreePath) -> Any:
        """Return the value of `node`, or the caller's live object at that path."""
        self._nodes += 1
        if len(path) > MAX_DEPTH or self._nodes > MAX_NODES:
            reason = f"the tree is deeper than {MAX_DEPTH} levels or has more than {MAX_NODES:,} values"
            raise fault(self.shown, path[:3], reason, "state-too-large")
        kind = type(node)
        # Most values of a long tree are texts, numbers and tensors without an object of the caller.
        if kind is not dict and kind is not list and not self.has_own:
            return node
        own = self.own(path)
        return self.live(own, node, path) if is_live(own) else self.stored(node, path)

    def stored(self, node: Any, path: TreePath) -> Any:
        """Return the value of `node`."""
        if type(node) is list:
            return self.items(node, path)
        if type(node) is not dict:
            return node
        tag = next((key for key in node if key[:1] == "$"), None)
        if tag is None:
            return self.mapping(node, path)
        try:
            ((tag, inner),) = node.items()
            together = TOGETHER.get(tag) or OF_CALLER[tag]
            return together(self, inner, path)
        except SafetensorError:
            raise
        except Exception as error:
            # Exceptions that types raise for an invalid node.
            reason = f"{_quoted(tag)} is invalid ({type(error).__name__}: {_escaped(str(error))})"
            raise fault(self.shown, path, reason) from None

    def items(self, node: Any, path: TreePath) -> list[Any]:
        """Return the list that `node` describes."""
        if type(node) is list:
            return [self.value(one, (*path, place)) for place, one in enumerate(node)]
        ((tag, name),) = node.items()
        if tag != "$numbers":
            raise ValueError(f"expected a list, found {tag!r}")
        dtype, data = self.raw(name, path)
        return data.cast(_LETTERS[dtype]).tolist()  # type: ignore[call-overload,no-any-return]

    def mapping(self, node: Any, path: TreePath) -> dict[Any, Any]:
        """Return the dict that `node` describes."""
        if "$dict" not in node:
            return {key: self.value(one, (*path, key)) for key, one in node.items()}
        ((_, pairs),) = node.items()
        found: dict[Any, Any] = {}
        for key_node, one in pairs:
            key = self._hashed(key_node, path)
            found[key] = self.value(one, (*path, key))
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    def members(self, node: Any, path: TreePath) -> list[Any]:
        """Return the members of the set that `node` describes."""
        if type(node) is not list:
            return self.items(node, path)
        found = [self._hashed(one, path) for one in node]
        if len(set(found)) < len(found):
            raise ValueError("a member is there twice")
        return found

    def _hashed(self, node: Any, path: TreePath) -> Any:
        """Return a key of a dict or a member of a set."""
        before, self._is_hashed = self._is_hashed, True
        found = self.value(node, (*path, "a key"))
        self._is_hashed = before
        return found

    def long_bytes(self, node: Any, path: TreePath) -> bytes:
        """Return bytes that are stored as a tensor."""
        dtype, data = self.raw(node["$tensor"], path)
        if dtype != "U8":
            raise ValueError(f"expected a tensor of U8, found {dtype}")
        return bytes(data)

    def noted(self, value: Any, path: TreePath, kind: str) -> Any:
        """Return `value`, and note that the file has a value of type `kind` there."""
        if self._is_hashed:
            raise unknown_class(self.shown, path[:-1], "a key or a member", kind)
        self.plain[spelled(path)] = kind
        return value


# Tensors, and objects of the caller's classes


def _tensor(decoder: Decoder, node: Any, path: TreePath) -> Any:
    name, framework = (node, None) if isinstance(node, str) else node
    return decoder.tensor(name, framework, path)


def _numbers(decoder: Decoder, node: Any, path: TreePath) -> list[Any]:
    return decoder.items({"$numbers": node}, path)


def _dict(decoder: Decoder, node: Any, path: TreePath) -> dict[Any, Any]:
    return decoder.mapping({"$dict": node}, path)


def _enum(decoder: Decoder, node: Any, path: TreePath) -> Any:
    kind = decoder.class_named(node["class"], path)
    if kind is None:
        return decoder.noted(dict(node), path, node["class"])
    return kind(node["value"]) if issubclass(kind, Flag) else kind[node["name"]]


def _named_tuple(decoder: Decoder, node: Any, path: TreePath) -> Any:
    inner = decoder.mapping(node["fields"], path)
    kind = decoder.class_named(node["class"], path)
    return decoder.noted(inner, path, node["class"]) if kind is None else kind(**inner)


def _dataclass(decoder: Decoder, node: Any, path: TreePath) -> Any:
    """Return a dataclass that has the stored fields. Like pickle, it does not call ``__init__``."""
    inner = decoder.mapping(node["fields"], path)
    kind = decoder.class_named(node["class"], path)
    if kind is None:
        return decoder.noted(inner, path, node["class"])
    made, own = object.__new__(kind), decoder.own(path)
    for one in fields(kind):
        if one.name in inner:
            found = inner.pop(one.name)
        elif is_static(one) and isinstance(own, kind):
            found = getattr(own, one.name)
        elif one.default is not MISSING:
            found = one.default
        elif one.default_factory is not MISSING:
            found = one.default_factory()
        else:
            raise ValueError(f"field {one.name!r} is missing")
        object.__setattr__(made, one.name, found)
    if inner:
        raise ValueError(f"{kind.__qualname__} has no field {next(iter(inner))!r}")
    return made


def _subclass(decoder: Decoder, node: Any, path: TreePath) -> Any:
    inner = {name: decoder.value(one, (*path, name)) for name, one in node["tensors"].items()}
    kind = decoder.class_named(node["class"], path)
    if kind is None:
        return decoder.noted(inner, path, node["class"])
    return decoder.flattened(kind, inner, node, path)


OF_CALLER: dict[str, Callable[[Decoder, Any, TreePath], Any]] = {
    "$tensor": _tensor,
    "$subclass": _subclass,
    "$numbers": _numbers,
    "$dict": _dict,
    "$enum": _enum,
    "$namedtuple": _named_tuple,
    "$dataclass": _dataclass,
}
