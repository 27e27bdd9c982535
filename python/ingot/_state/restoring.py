"""Restores trees of state for a caller: planned and checked first, and then read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from sys import modules
from typing import Any, NamedTuple, Protocol

from ingot._base.frameworks import FRAMEWORKS, owner
from ingot._base.keys import select
from ingot._base.options import Loading
from ingot._base.text import _escaped
from ingot._native import STATE_KEY, Checkpoint, TensorInfo
from ingot._write.states import head_of, tree_of

from .decoder import Decoder, fault, unknown_class
from .objects import TreePath, fields_of, is_live, is_tensor, spelled, within

#: The tag of a list with the state of each rank.
RANKS_TAG = "$ranks"

# The module to import for tensors of a framework, if it has another name.
_PACKAGES = {"flax": "jax", "mlx": "mlx.core"}


class Contents(NamedTuple):
    """An open file, and the source of its bytes: the file, or a copy that is compared with digests."""

    checkpoint: Checkpoint
    source: Checkpoint

    @property
    def shown(self) -> str:
        """The name of the file in messages."""
        return "the file" if self.checkpoint.path is None else _escaped(self.checkpoint.path)

    def info(self, name: Any, path: TreePath) -> TensorInfo:
        """Return the dtype and the shape of a tensor that the tree names at `path`."""
        if not isinstance(name, str) or name not in self.checkpoint:
            raise fault(self.shown, path, f"the file has no tensor {name!r}")
        return self.checkpoint.info(name)

    def raw(self, name: Any, path: TreePath) -> tuple[str, memoryview]:
        """Return the dtype and the bytes of a tensor."""
        info = self.info(name, path)
        return info.dtype, self.source.tensor_bytes(name, 0, info.nbytes)

    def tree(self) -> Any:
        """Return the JSON of the tree."""
        head = self.head()
        if "ranks" in head:
            way_out = "pass the directory of the step, or load it by ingot.Checkpoints"
            reason = f"{head['ranks']} ranks have saved the state to several files: {way_out}"
            raise fault(self.shown, (), reason, "state-of-ranks", found=head["ranks"])
        return tree_of(head, self.shown, lambda name: self.raw(name, ())[1])

    def head(self) -> dict[str, Any]:
        """Return the outer object of the state."""
        text = (self.checkpoint.metadata() or {}).get(STATE_KEY)
        if not isinstance(text, str):
            reason = f"expected {STATE_KEY} in the metadata, found none: load its tensors by load_file"
            raise fault(self.shown, (), reason, "no-state")
        return head_of(text, self.shown)


class Stored(NamedTuple):
    """A placeholder for a tensor of the file that is not loaded yet, with the shape that it will have.

    The dtype is the code in the file, and empty if the tensor is made of several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""


class Live(NamedTuple):
    """A live object, and the argument of its `load_state_dict`."""

    value: Any
    state: Any
    path: TreePath


class Planner(Protocol):
    """Handles the tensors and the live objects of a caller for one framework."""

    framework: str

    def shape_of(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape that a tensor of the file has in the framework."""
        ...

    def plan(self, live: Live, restoring: Restoring) -> None:
        """Check the state of a live object, whose tensors are not loaded yet."""

    def place(self, own: Any, stored: Stored, path: TreePath, restoring: Restoring) -> None:
        """Plan to read a tensor of the file into the caller's tensor, or to its device."""

    def state_for(self, live: Live, restoring: Restoring) -> Any:
        """Return the argument for `load_state_dict`."""


class Restoring(Decoder):
    """Puts a tree together twice: once to plan the reads, and once with the loaded tensors.

    Attributes
    ----------
    filled : dict of path to (tensor, str)
        The caller's tensors that are filled, and the name of each in the file.
    devices : dict of str to object
        The devices of new tensors that do not go to the default device.
    loaded : dict of str to tensor, optional
        The other tensors by name, after they have been read.
    known : object
        Facts about the caller's live objects, for the framework.
    lives : list of Live
        The live objects, in the order of the tree.
    missing : list of str
        The paths of values that only the caller has.
    is_partial : bool
        Whether the caller loads only some of the tensors.
    unfit : dict of str to int
        The paths of states of another number of ranks than load, which are returned as lists.
    rank, ranks : int
        The number of this rank, and of the ranks that load. A state that each rank has for itself fits as
        many ranks as have saved it.
    """

    def __init__(
        self, contents: Contents, planner: Planner, into: Any, types: Iterable[type], is_partial: bool
    ) -> None:
        super().__init__(contents.shown)
        self.filled: dict[TreePath, tuple[Any, str]] = {}
        self.devices: dict[str, Any] = {}
        self.loaded: dict[str, Any] | None = None
        self.known: Any = None
        self.lives: list[Live] = []
        self.missing: list[str] = []
        self.is_partial = is_partial
        self.rank, self.ranks = 0, 1
        self.unfit: dict[str, int] = {}
        self.values = {} if into is None else dict(within(into))
        self.has_own = into is not None
        self._contents = contents
        self._planner = planner
        self._classes = {kind.__qualname__: kind for kind in types}
        # The name of the tensor at each path, and the module that makes it.
        self._asked: dict[TreePath, tuple[str, str]] = {}
        self._raws: dict[str, tuple[str, memoryview]] = {}
        # The paths of the caller's tensors and live objects that the file has something for.
        self._met: set[TreePath] = set()

    def planned(self, node: Any) -> None:
        """Plan the reads for `node`. Raise if it does not fit the caller's objects."""
        self.value(node, ())
        if self.is_partial:
            return
        for path, own in self.values.items():
            if path not in self._met and (is_live(own) or is_tensor(own)):
                what = "a tensor" if is_tensor(own) else f"the state of a {type(own).__name__}"
                raise fault(self.shown, path, f"expected {what}, found none in the file", "state-missing")

    def restored(self, node: Any, loaded: dict[str, Any]) -> Any:
        """Return the tree of `node` with the tensors that were read, and note the live objects in it."""
        self.loaded = loaded
        self.plain.clear()
        self.missing.clear()
        self._nodes = 0
        return self.value(node, ())

    def value(self, node: Any, path: TreePath) -> Any:
        nodes = node.get(RANKS_TAG) if type(node) is dict else None
        if type(nodes) is not list:
            return super().value(node, path)
        if len(nodes) == self.ranks:
            return super().value(nodes[self.rank], path)
        # Without the caller's object, which takes the state of one rank.
        self._met.add(path)
        found = [super(Restoring, self).value(one, (*path, place)) for place, one in enumerate(nodes)]
        self.unfit[spelled(path)] = len(nodes)
        return found

    def own(self, path: TreePath) -> Any:
        return self.values.get(path)

    def class_named(self, name: str, path: TreePath) -> Any:
        own = self.own(path)
        is_typed = isinstance(own, Enum) or fields_of(own) is not None or hasattr(own, "__tensor_flatten__")
        return type(own) if is_typed else self._classes.get(name)

    def add_classes(self, kinds: Iterable[type]) -> None:
        """Add classes that objects of the caller have."""
        self._classes = {kind.__qualname__: kind for kind in kinds} | self._classes

    def mapping(self, node: Any, path: TreePath) -> dict[Any, Any]:
        found = super().mapping(node, path)
        own = self.own(path)
        if isinstance(own, Mapping) and not is_live(own):
            lacking = {key: value for key, value in own.items() if key not in found}
            self.missing += [spelled((*path, key)) for key in lacking]
            found |= lacking
        return found

    def raw(self, name: str, path: TreePath) -> tuple[str, memoryview]:
        if name not in self._raws:
            self._raws[name] = self._contents.raw(name, path)
        return self._raws[name]

    def tensor(self, name: str, framework: str | None, path: TreePath) -> Any:
        if self.loaded is not None and path in self.filled:
            return self.filled[path][0]
        module = self._module(framework, path)
        if self.loaded is not None:
            return self.loaded[name]
        info = self._contents.info(name, path)
        stored = Stored(name, self._planner.shape_of(info), info.dtype)
        own = self.own(path)
        self._asked[path] = name, module
        if is_tensor(own) and module == self._planner.framework:
            self._met.add(path)
            self._planner.place(own, stored, path, self)
        elif is_tensor(own) and module == owner(own):
            # It comes from the file, as plain values do.
            self._met.add(path)
        return stored

    def fresh(self) -> dict[str, list[str]]:
        """Return the names of the tensors that are not filled in place, by the modules that create them."""
        found: dict[str, dict[str, None]] = {}
        for path, (name, module) in self._asked.items():
            if path not in self.filled:
                found.setdefault(module, {})[name] = None
        return {module: [*names] for module, names in found.items()}

    def _module(self, framework: str | None, path: TreePath) -> str:
        """Return the module that creates a tensor: its framework's if that is imported, else the caller's."""
        own = self._planner.framework
        if framework is None or framework == own:
            return own
        if framework not in FRAMEWORKS.values():
            raise ValueError(f"{framework!r} is not a framework")
        if _PACKAGES.get(framework, framework) in modules:
            return framework
        self.noted(None, path, f"tensor of {framework}")
        return own

    def flattened(self, kind: Any, inner: dict[str, Any], node: dict[str, Any], path: TreePath) -> Any:
        shape, stride = self.items(node["shape"], path), self.items(node["stride"], path)
        context = self.value(node["context"], (*path, "context"))
        if self.loaded is None:
            return Stored("", tuple(shape))
        return kind.__tensor_unflatten__(inner, context, tuple(shape), tuple(stride))

    def live(self, value: Any, node: Any, path: TreePath) -> Any:
        self._met.add(path)
        known = len(self.plain)
        found = Live(value, self.stored(node, path), path)
        if len(self.plain) > known:
            _, kind = [*self.plain.items()][known]
            raise unknown_class(self.shown, path, f"the state of a {type(value).__name__}", kind)
        if self.loaded is None:
            self._planner.plan(found, self)
        else:
            self.lives.append(found._replace(state=self._planner.state_for(found, self)))
        return value


def selected(node: Any, contents: Contents, how: Loading) -> Any:
    """Return `node` with only the tensors that `keys` and `drop` select, and the containers around them."""
    keys = tuple(contents.checkpoint.all_names()) if how.keys is None else how.keys
    names = {*select(contents.checkpoint, keys, how.drop)}
    try:
        found = _some(node, names)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        raise fault(contents.shown, (), "the tree is invalid") from None
    return {} if found is _GONE else found


_GONE = object()


def _some(node: Any, names: set[str]) -> Any:
    """Return the containers around the tensors with these names, or `_GONE`."""
    if type(node) is list:
        inner = [_some(one, names) for one in node]
        # The other items keep their positions.
        return _GONE if set(map(id, inner)) <= {id(_GONE)} else [_or_none(one) for one in inner]
    if type(node) is not dict:
        return _GONE
    tag, content = next(iter(node.items()), ("", None))
    if not tag.startswith("$"):
        kept = {key: found for key, one in node.items() if (found := _some(one, names)) is not _GONE}
        return kept or _GONE
    within_tag = _WITHIN.get(tag)
    return _GONE if within_tag is None else within_tag(node, content, names)


def _or_none(found: Any) -> Any:
    return None if found is _GONE else found


def _some_tensor(node: Any, inner: Any, names: set[str]) -> Any:
    return node if (inner if isinstance(inner, str) else inner[0]) in names else _GONE


def _some_pairs(_: Any, inner: Any, names: set[str]) -> Any:
    pairs = [[key, found] for key, one in inner if (found := _some(one, names)) is not _GONE]
    return {"$dict": pairs} if pairs else _GONE


def _some_at(place: int) -> Callable[[Any, Any, set[str]], Any]:
    """Return a function for tags with a list, whose item at `place` has the tensors."""

    def some(node: Any, inner: Any, names: set[str]) -> Any:
        found = _some(inner[place], names)
        return _GONE if found is _GONE else {next(iter(node)): [*inner[:place], found, *inner[place + 1 :]]}

    return some


# For tags whose nodes contain tensors.
_WITHIN: dict[str, Callable[[Any, Any, set[str]], Any]] = {
    "$tensor": _some_tensor,
    "$subclass": lambda node, inner, names: _GONE if _some(inner["tensors"], names) is _GONE else node,
    "$dict": _some_pairs,
    "$ordered": _some_at(0),
    "$default": _some_at(1),
    "$deque": _some_at(0),
    "$tuple": lambda _, inner, names: _GONE if (found := _some(inner, names)) is _GONE else {"$tuple": found},
    # An object without all of its fields becomes a dict.
    "$namedtuple": lambda _, inner, names: _some(inner["fields"], names),
    "$dataclass": lambda _, inner, names: _some(inner["fields"], names),
}
