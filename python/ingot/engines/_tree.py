"""Convert a tree of state into named tensors and a text, without pickle, so that a file runs no code.

The text is JSON. Values that JSON has are stored as they are. Every other value is an object with one key,
which begins with a dollar and names the kind of the value (`_KINDS`). A tensor is ``{"$tensor": NAME}``.
Dicts whose keys are not all texts, or have one that begins with a dollar, are lists of pairs.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from ingot._base.text import _quoted
from ingot.errors import CheckpointError, SaveError

# Returns the JSON node of the value at a place of the tree, and the value of a JSON node.
Apart: TypeAlias = Callable[[Any, str], Any]
Together: TypeAlias = Callable[[Any], Any]

#: The key of the text in the metadata of a file.
KEY = "ingot.tree"


class _Kind(NamedTuple):
    """A class of values that JSON has not, as what JSON has, and back."""

    made: type
    apart: Callable[[Any, Apart], Any]
    together: Callable[[Any, Together], Any]


def _listed(values: Iterable[Any], apart: Apart) -> list[Any]:
    return [apart(value, str(at)) for at, value in enumerate(values)]


def _paired(values: Mapping[Any, Any], apart: Apart) -> list[Any]:
    return [[apart(key, "a key"), apart(value, str(key))] for key, value in values.items()]


def _pairs(node: list[Any], together: Together) -> list[tuple[Any, Any]]:
    return [(together(key), together(value)) for key, value in node]


def _ordered(values: OrderedDict[Any, Any], apart: Apart) -> list[Any]:
    # A module keeps the versions of its parts there.
    versions = getattr(values, "_metadata", None)
    return [_paired(values, apart), None if versions is None else apart(versions, "_metadata")]


def _in_order(node: list[Any], together: Together) -> OrderedDict[Any, Any]:
    pairs, versions = node
    made = OrderedDict(_pairs(pairs, together))
    if versions is not None:
        made._metadata = together(versions)  # type: ignore[attr-defined]
    return made


def _factory(values: defaultdict[Any, Any], apart: Apart) -> list[Any]:
    factory = values.default_factory
    name = None if factory is None else next(name for name, one in _FACTORIES.items() if one is factory)
    return [name, _paired(values, apart)]


def _with_factory(node: list[Any], together: Together) -> defaultdict[Any, Any]:
    name, pairs = node
    return defaultdict(None if name is None else _FACTORIES[name], _pairs(pairs, together))


def _dtype(node: Any) -> torch.dtype:
    found = getattr(torch, node)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {node!r}")
    return found


_FACTORIES: dict[str, type] = {one.__name__: one for one in (bool, dict, float, int, list, set, str)}
_KINDS = {
    "$float": _Kind(float, lambda value, _: repr(value), lambda node, _: float(node)),
    "$complex": _Kind(
        complex,
        lambda value, _: [repr(value.real), repr(value.imag)],
        lambda node, _: complex(*map(float, node)),
    ),
    "$bytes": _Kind(bytes, lambda value, _: b64encode(value).decode(), lambda node, _: b64decode(node)),
    "$tuple": _Kind(tuple, _listed, lambda node, together: tuple(map(together, node))),
    "$set": _Kind(set, _listed, lambda node, together: set(map(together, node))),
    "$frozenset": _Kind(frozenset, _listed, lambda node, together: frozenset(map(together, node))),
    "$dict": _Kind(dict, _paired, lambda node, together: dict(_pairs(node, together))),
    "$ordered": _Kind(OrderedDict, _ordered, _in_order),
    "$default": _Kind(defaultdict, _factory, _with_factory),
    "$counter": _Kind(Counter, _paired, lambda node, together: Counter(dict(_pairs(node, together)))),
    "$path": _Kind(type(Path()), lambda value, _: str(value), lambda node, _: Path(node)),
    "$size": _Kind(torch.Size, lambda value, _: [*value], lambda node, _: torch.Size(node)),
    "$dtype": _Kind(torch.dtype, lambda value, _: str(value).partition(".")[2], lambda node, _: _dtype(node)),
    "$device": _Kind(torch.device, lambda value, _: str(value), lambda node, _: torch.device(node)),
}
_TAG_OF = {kind.made: tag for tag, kind in _KINDS.items()}


def taken_apart(tree: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of `tree`, named by their place in it, and the rest as text.

    Raises `SaveError` for what only pickle could store, with its place.
    """
    parts = _Parts()
    try:
        return parts.tensors, json.dumps(parts.node(dict(tree), ()), separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise SaveError("what is to be saved contains itself, or is too deep", code="not-plain") from None


class _Parts:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def node(self, value: Any, place: tuple[str, ...]) -> Any:
        """Return `value` as JSON represents it."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._named(value, place)}

        def inner(value: Any, step: str) -> Any:
            return self.node(value, (*place, step))

        if kind is list:
            return _listed(value, inner)
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(one, key) for key, one in value.items()}
        if kind.__module__ == "numpy" and hasattr(value, "__array__"):
            return self._of_numpy(value, place)
        tag = _TAG_OF.get(kind)
        if tag is None or (kind is defaultdict and value.default_factory not in (None, *_FACTORIES.values())):
            raise _refused(place, value)
        return {tag: _KINDS[tag].apart(value, inner)}

    def _of_numpy(self, value: Any, place: tuple[str, ...]) -> Any:
        import numpy as np

        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            raise _refused(place, value) from None
        tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: self._named(tensor, place)}

    def _named(self, tensor: torch.Tensor, place: tuple[str, ...]) -> str:
        name = ".".join(place)
        # Names may have dots in them: two places can be spelt alike.
        taken = name
        while taken in self.tensors:
            taken = f"{taken}'"
        self.tensors[taken] = tensor
        return taken


def _refused(place: tuple[str, ...], value: object) -> SaveError:
    kind = type(value)
    called = value.__qualname__ if isinstance(value, type) else f"{kind.__module__}.{kind.__qualname__}"
    way_out = "give numbers, texts, lists, dicts or tensors of it instead"
    # Of a module, or of a data module, of Lightning.
    if len(place) > 1 and place[0].endswith("hyper_parameters"):
        way_out = f"leave it out by save_hyperparameters(ignore=[{place[1]!r}]), or {way_out}"
    what = "the class " if isinstance(value, type) else ""
    message = f"{_quoted('.'.join(place))}: only pickle could store {what}{called}: {way_out}"
    return SaveError(message, code="not-plain", tensor=".".join(place), found=called)


def put_together(text: str, tensors: Mapping[str, torch.Tensor], shown: str) -> dict[str, Any]:
    """Build the tree of the file `shown`. Raise `CheckpointError` for an invalid one."""
    try:
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise TypeError(f"expected a dict, found {type(tree).__name__}")
        found: dict[str, Any] = _Made(tensors).value(tree)
        return found
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        RuntimeError,
    ) as fault:
        message = f"{shown}: {KEY} in the metadata cannot be read ({type(fault).__name__}: {fault})"
        raise CheckpointError(message, code="invalid-tree") from None


class _Made:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def value(self, node: Any) -> Any:
        """Return the value of `node`."""
        if isinstance(node, list):
            return [self.value(one) for one in node]
        if not isinstance(node, dict):
            return node
        if not any(key.startswith("$") for key in node):
            return {key: self.value(one) for key, one in node.items()}
        ((tag, inner),) = node.items()
        if tag == "$tensor":
            return self._tensors[inner]
        if tag in ("$array", "$scalar"):
            array = self._tensors[inner].cpu().numpy()
            return array if tag == "$array" else array[()]
        return _KINDS[tag].together(inner, self.value)
