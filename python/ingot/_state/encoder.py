"""Splits trees of state into JSON and named tensors: FORMAT.md, "Training state"."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

from ingot._base.frameworks import owner
from ingot._base.text import _quoted
from ingot._native import STATE_KEY
from ingot._write.states import MAX_NODES, VERSION, tensors_in
from ingot.errors import SaveError

from .kinds import KINDS, of_framework
from .objects import LEAVES, MAX_DEPTH, TreePath, fields_of, is_live, is_tensor, spelled
from .sections import Section

#: Longer trees are a tensor, since every reader of the file parses the metadata.
_INLINE_NBYTES = 1 << 20
#: Longer bytes are a tensor, and so are more numbers, of 8 bytes each.
_SHORT_NBYTES = 1 << 10
#: Other readers have integers of 64 bits.
_LARGE = 1 << 63
#: Dicts of as many values are looked at as a whole, and their tensors are a section.
_MANY = 1_000
# A tag for the place of a section while a tree is rendered.
_SECTION_TAG = "$section"


class Raw(NamedTuple):
    """Numbers or bytes that are stored as a tensor of one dimension."""

    dtype: str
    data: Any


class Encoder:
    """Splits a tree into nodes of JSON and `tensors` by name.

    Parameters
    ----------
    framework : str
        The framework whose tensors are stored without a mark.
    states : dict of int to object
        The states of live objects, by the ids of these.
    known : dict of path to Section, optional
        The sections of an earlier tree. Without it, all nodes are values of JSON.

    Attributes
    ----------
    tensors : dict of str to tensor
        The tensors by name.
    sections : dict of path to Section
        The sections of this tree.
    """

    def __init__(
        self, framework: str, states: Mapping[int, Any], known: Mapping[TreePath, Section] | None = None
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self.sections: dict[TreePath, Section] = {}
        self._known = known
        # The names that are not stored, each with the name of the same tensor.
        self._tied: dict[str, str] = {}
        self._framework = framework
        self._states = states
        self._nodes = 0
        # Set within keys of dicts and members of sets, which have no tensors.
        self._is_hashed = False
        # Classes of the framework's tensors that have been met, since a tree may have many tensors.
        self._plain: set[type] = set()

    def metadata(self, tree: Any) -> dict[str, str]:
        """Split `tree`. Return the metadata that describes it."""
        return self.described(self.text(self.tree(tree)))

    def text(self, node: Any) -> str:
        """Return a node of this tree as compact JSON."""
        found: list[Section] = []

        def placed(section: Section) -> dict[str, int]:
            found.append(section)
            return {_SECTION_TAG: len(found) - 1}

        rest, parts = json_of(node, placed), []
        for place, section in enumerate(found):
            # Keys of the caller that begin with "$" are stored in another form, and quotes in texts are
            # escaped.
            before, _, rest = rest.partition(json_of({_SECTION_TAG: place}))
            parts += [before, section.text(self._tied)]
        return "".join([*parts, rest])

    def tree(self, tree: Any) -> Any:
        """Split `tree`. Return its node, in which tensors that are stored once have one name."""
        node = self.node(tree, ())
        self.tie(node, [*self.tensors])
        return node

    def described(self, text: str, **facts: Any) -> dict[str, str]:
        """Return the metadata for a tree that is JSON already. `facts` are members of the outer object."""
        head: dict[str, Any] = {"version": VERSION, "framework": self._framework, **facts}
        if len(text) > _INLINE_NBYTES:
            stored = self._store(Raw("U8", text.encode()), STATE_KEY)
            return {STATE_KEY: json_of({**head, "tensor": stored})}
        return {STATE_KEY: f'{json_of(head)[:-1]},"tree":{text}}}'}

    def node(self, value: Any, path: TreePath) -> Any:
        """Return the node of `value`."""
        self._nodes += 1
        if len(path) > MAX_DEPTH or self._nodes > MAX_NODES:
            raise self._too_large(path)
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind in self._plain and not self._is_hashed:
            return {"$tensor": self._store(value, _called(path))}
        if (kind is int and -_LARGE <= value < _LARGE) or (kind is float and isfinite(value)):
            return value
        if kind is list:
            return self.items(value, path)
        if kind is dict:
            return self.mapping(value, path)
        if kind in KINDS:
            return {KINDS[kind].tag: KINDS[kind].apart(self, value, path)}
        return self._object(value, path)

    def items(self, values: Iterable[Any], path: TreePath) -> Any:
        """Return the node of a list: of many numbers the name of a tensor."""
        values = [*values]
        raw = None if 8 * len(values) <= _SHORT_NBYTES or self._is_hashed else _numbers(values)
        if raw is not None:
            return {"$numbers": self._store(raw, _called(path))}
        if len(values) >= _MANY and _are_json(values):
            self._count(len(values), len(path) + 1, path)
            return values
        return [self.node(value, (*path, place)) for place, value in enumerate(values)]

    def members(self, values: Iterable[Any], path: TreePath) -> Any:
        """Return the node of a list of the members of a set, in an order that depends on them only."""
        values = [*values]
        if set(map(type, values)) <= {int}:
            return self.items(sorted(values), path)
        return sorted((self._hashed(value, path) for value in values), key=json_of)

    def mapping(self, values: Mapping[Any, Any], path: TreePath) -> Any:
        """Return the node of a dict: an object if its keys allow it, otherwise pairs."""
        if _are_members(values):
            if values and self._are_plain(values.values()):
                return self._tensors(values, path)
            found = self._table(values, path) if len(values) >= _MANY else None
            if found is not None:
                return found
            return {key: self.node(value, (*path, key)) for key, value in values.items()}
        pairs = [[self._hashed(key, path), self.node(value, (*path, key))] for key, value in values.items()]
        return {"$dict": pairs}

    def long_bytes(self, value: bytes | bytearray, path: TreePath) -> Any:
        """Return the node of many bytes, which are stored as a tensor. None for few bytes."""
        if len(value) <= _SHORT_NBYTES or self._is_hashed:
            return None
        return {"$tensor": self._store(Raw("U8", value), _called(path))}

    def refused(self, value: Any, path: TreePath) -> SaveError:
        """Return the error for a value that only pickle could store."""
        kind = value if isinstance(value, type) else type(value)
        called = f"{kind.__module__}.{kind.__qualname__}"
        found = f"the class {called}" if isinstance(value, type) else called
        way_out = "save numbers, texts, lists, dicts or tensors of it instead"
        if hasattr(value, "get_state"):
            way_out = "save what its get_state() returns instead"
        elif kind.__name__ in ("Namespace", "SimpleNamespace"):
            way_out = "save vars(…) of it instead, which is a dict"
        return _refused(path, f"only pickle could store {found}: {way_out}", "not-plain", called)

    def _are_plain(self, values: Collection[Any]) -> bool:
        """Return whether all values are tensors of the framework."""
        kinds = set(map(type, values))
        if self._is_hashed or not kinds.isdisjoint(LEAVES):
            return False
        if kinds <= self._plain:
            return True
        return all(map(self._is_plain, {type(value): value for value in values}.values()))

    def _is_plain(self, value: Any) -> bool:
        """Return whether `value` is a tensor of the framework that is stored as it is."""
        kind = type(value)
        if kind in self._plain:
            return True
        if is_live(value) or not is_tensor(value):
            return False
        if _is_flattened(kind) or owner(value) != self._framework:
            return False
        self._plain.add(kind)
        return True

    def _tensors(self, values: Mapping[str, Any], path: TreePath) -> Any:
        """Return the node of a dict of tensors. It makes no path for each, since there may be many."""
        section = self._section([*values], None, [*values.values()], path) if len(values) >= _MANY else None
        self._count(len(values), len(path) + 1, path)
        if section is not None:
            return section
        prefix = _prefix(path)
        return {key: {"$tensor": self._store(value, prefix + key)} for key, value in values.items()}

    def _table(self, values: Mapping[str, Any], path: TreePath) -> Any:
        """Return the node of many dicts of tensors, or of values that JSON has. None for other values."""
        inner = [*values.values()]
        if {*map(type, inner)} != {dict} or not _are_members({*chain.from_iterable(inner)}):
            return None
        leaves = [*chain.from_iterable(map(dict.values, inner))]
        found: Any = None
        if _are_json(leaves):
            found = dict(zip(values, map(dict, inner), strict=True))
        elif self._are_plain(leaves):
            found = self._section([*values], [*map(tuple, inner)], leaves, path)
        if found is not None:
            self._count(len(inner) + len(leaves), len(path) + 2, path)
        return found

    def _section(
        self, keys: list[str], inner: list[tuple[str, ...]] | None, tensors: list[Any], path: TreePath
    ) -> Section | None:
        """Store many tensors, and return their node. None if a name is taken."""
        if self._known is None:
            return None
        prefix, known = _prefix(path), self._known.get(path)
        is_known = known is not None and known.is_of(prefix, keys, inner)
        found = known if known is not None and is_known else Section(prefix, keys, inner)
        if not found.are_distinct or not self.tensors.keys().isdisjoint(found.names):
            return None
        self.tensors.update(zip(found.names, tensors, strict=True))
        self.sections[path] = found
        return found

    def _count(self, nodes: int, depth: int, path: TreePath) -> None:
        """Count nodes that are not made one by one. Raise if the tree is too large."""
        self._nodes += nodes
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise self._too_large(path)

    def _hashed(self, value: Any, path: TreePath) -> Any:
        before, self._is_hashed = self._is_hashed, True
        node = self.node(value, (*path, "a key"))
        self._is_hashed = before
        return node

    def _object(self, value: Any, path: TreePath) -> Any:
        known = of_framework(value)
        if known is not None:
            return {known[0]: known[1]}
        if isinstance(value, Enum):
            return {"$enum": _enum_node(value)}
        if not self._is_hashed and id(value) in self._states:
            return self.node(self._states[id(value)], path)
        if is_live(value):
            raise self.refused(value, path)
        if not self._is_hashed and is_tensor(value):
            return self._tensor(value, path)
        inner = fields_of(value)
        if inner is None:
            raise self.refused(value, path)
        tag = "$namedtuple" if isinstance(value, tuple) else "$dataclass"
        return {tag: {"class": type(value).__qualname__, "fields": self.mapping(inner, path)}}

    def _tensor(self, value: Any, path: TreePath) -> Any:
        kind: Any = type(value)
        if _is_flattened(kind):
            names, context = value.__tensor_flatten__()
            inner = {name: self.node(getattr(value, name), (*path, name)) for name in names}
            node = {"class": kind.__qualname__, "tensors": inner, "shape": [*value.shape]}
            context = self.node(context, (*path, "context"))
            return {"$subclass": {**node, "stride": [*value.stride()], "context": context}}
        framework, name = owner(value), self._store(value, _called(path))
        return {
            "$tensor": name if self._is_plain(value) or framework == self._framework else [name, framework]
        }

    def tie(self, node: Any, names: list[str]) -> None:
        """Store tensors of `names` that are the same once, under one name in `node`."""
        values = [self.tensors[name] for name in names]
        places = self.places(values)
        if len({*places}) == len(places):
            return
        counts = Counter(places)
        first: dict[Any, str] = {}
        tied: dict[str, str] = {}
        for name, value, place in zip(names, values, places, strict=True):
            if counts[place] > 1 and first.setdefault(self.key(value), name) != name:
                tied[name] = first[self.key(value)]
                del self.tensors[name]
        self._tied |= tied
        for inner, tag, name in [*tensors_in(node)] if tied else ():
            if name in tied:
                inner[tag] = [tied[name], *inner[tag][1:]] if type(inner[tag]) is list else tied[name]

    def places(self, tensors: list[Any]) -> list[Any]:
        """Return values that are equal for tensors that may be the same. `tensors` keeps them alive."""
        return [*map(id, tensors)]

    def key(self, tensor: Any) -> Any:
        """Return a value that is equal for tensors that are the same."""
        return id(tensor)

    def _store(self, tensor: Any, name: str) -> str:
        # Steps may have dots in them, so that two paths make one name; and one name is reserved.
        while name in self.tensors or name == "__metadata__":
            name += "'"
        self.tensors[name] = tensor
        return name

    def _too_large(self, path: TreePath) -> SaveError:
        if self._nodes > MAX_NODES:
            return _refused(
                path, f"the tree has more than {MAX_NODES:,} values", "state-too-large", MAX_NODES
            )
        reason = f"values are nested deeper than {MAX_DEPTH} levels, or one contains itself"
        return _refused(path[:3], reason, "state-too-large", MAX_DEPTH)


def _are_members(values: Collection[Any]) -> bool:
    """Return whether keys can be keys of a JSON object: texts that do not look like tags."""
    # One look at the texts of all keys, since a tree has many small dicts.
    return set(map(type, values)) <= {str} and (
        "$" not in "".join(values) or not any(key.startswith("$") for key in values)
    )


def _are_json(values: Collection[Any]) -> bool:
    """Return whether JSON has all values as they are: texts, None, bools, and integers that are not large."""
    kinds = {*map(type, values)}
    if not kinds <= {str, bool, int, type(None)}:
        return False
    numbers = [value for value in values if type(value) is int] if int in kinds else [0]
    return min(numbers) >= -_LARGE and max(numbers) < _LARGE


def _prefix(path: TreePath) -> str:
    """Return the beginning of the names of tensors under a path."""
    return f"{_called(path)}." if path else ""


def _called(path: TreePath) -> str:
    """Return the name of the tensor at a path, unless another has it."""
    return ".".join(map(str, path))


def _is_flattened(kind: Any) -> bool:
    """Return whether tensors of a class are stored as the tensors that they are made of."""
    # A part of a tensor that ranks share can be flattened too.
    return hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "full_tensor")


def _refused(path: TreePath, reason: str, code: str, found: object) -> SaveError:
    place = spelled(path)
    return SaveError(f"{_quoted(place)}: {reason}", code=code, tensor=place, found=found)


def json_of(node: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return a node as compact JSON. `default` returns values of JSON for others."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False, default=default)


def _numbers(values: list[Any]) -> Raw | None:
    """Return numbers of one type, or None if they have several types or more than 64 bits."""
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            return Raw("I64", array("q", values))
    except OverflowError:
        return None
    if kinds == {float}:
        return Raw("F64", array("d", values))
    return Raw("BOOL", bytes(values)) if kinds == {bool} else None


def _enum_node(value: Enum) -> dict[str, Any]:
    # A combination of flags may have no name, and values may be anything.
    shown = value.value if type(value.value) in (int, str) else None
    return {"class": type(value).__qualname__, "name": value.name, "value": shown}
