"""Values that JSON lacks, and how a tree of state writes each: FORMAT.md, "Training state".

A value is a JSON object with one key, its tag. Each kind has a function that encodes a value and one that
decodes it.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from math import isnan
from pathlib import Path as FilePath
from sys import modules
from typing import Any, NamedTuple, Protocol

from ingot.errors import SaveError

from .objects import TreePath


class TreeWriter(Protocol):
    """The methods of `Encoder` that encode values."""

    def node(self, value: Any, path: TreePath) -> Any:
        """Return the node of a value."""
        ...

    def items(self, values: Iterable[Any], path: TreePath) -> Any:
        """Return the node of a list."""
        ...

    def members(self, values: Iterable[Any], path: TreePath) -> Any:
        """Return the node of the members of a set."""
        ...

    def mapping(self, values: Mapping[Any, Any], path: TreePath) -> Any:
        """Return the node of a dict."""
        ...

    def long_bytes(self, value: bytes | bytearray, path: TreePath) -> Any:
        """Return the node of bytes that are stored as a tensor. None for few bytes."""
        ...

    def refused(self, value: Any, path: TreePath) -> SaveError:
        """Return the error for a value that cannot be stored."""
        ...


class TreeReader(Protocol):
    """The methods of `Decoder` that decode values."""

    def value(self, node: Any, path: TreePath) -> Any:
        """Return the value of a node."""
        ...

    def items(self, node: Any, path: TreePath) -> list[Any]:
        """Return a list."""
        ...

    def members(self, node: Any, path: TreePath) -> list[Any]:
        """Return the members of a set."""
        ...

    def mapping(self, node: Any, path: TreePath) -> dict[Any, Any]:
        """Return a dict."""
        ...

    def long_bytes(self, node: Any, path: TreePath) -> bytes:
        """Return bytes that are stored as a tensor."""
        ...

    def noted(self, value: Any, path: TreePath, kind: str) -> Any:
        """Return a value, and note that the file has a value of type `kind` there."""
        ...


class Kind(NamedTuple):
    """How values of one type are written and read."""

    tag: str
    #: Returns the node of a value.
    apart: Callable[[TreeWriter, Any, TreePath], Any]
    #: Returns the value of a node.
    together: Callable[[TreeReader, Any, TreePath], Any]


# Numbers


def _float_apart(_: TreeWriter, value: float, __: TreePath) -> str:
    bits = struct.pack(">d", value).hex()
    return bits if isnan(value) and bits != _USUAL_NAN else repr(value)


def _float(_: TreeReader, node: Any, __: TreePath) -> float:
    if node in ("nan", "inf", "-inf"):
        return float(node)
    (value,) = struct.unpack(">d", bytes.fromhex(node))
    return float(value)


_USUAL_NAN = struct.pack(">d", float("nan")).hex()


def _complex_apart(encoder: TreeWriter, value: complex, path: TreePath) -> list[Any]:
    return [encoder.node(value.real, path), encoder.node(value.imag, path)]


def _complex(decoder: TreeReader, node: Any, path: TreePath) -> complex:
    real, imag = node
    return complex(decoder.value(real, path), decoder.value(imag, path))


# Bytes and containers


def _bytes_apart(encoder: TreeWriter, value: bytes | bytearray, path: TreePath) -> Any:
    return encoder.long_bytes(value, path) or b64encode(value).decode()


def _bytes(decoder: TreeReader, node: Any, path: TreePath) -> bytes:
    return b64decode(node, validate=True) if isinstance(node, str) else decoder.long_bytes(node, path)


def _ordered_apart(encoder: TreeWriter, values: OrderedDict[Any, Any], path: TreePath) -> list[Any]:
    # A module stores the versions of its parts there.
    versions = getattr(values, "_metadata", None)
    return [encoder.mapping(values, path), encoder.node(versions, (*path, "_metadata"))]


def _ordered(decoder: TreeReader, node: Any, path: TreePath) -> OrderedDict[Any, Any]:
    items, versions = node
    made = OrderedDict(decoder.mapping(items, path))
    if versions is not None:
        made._metadata = decoder.value(versions, (*path, "_metadata"))  # type: ignore[attr-defined]
    return made


#: The default factories of a `defaultdict`, by their names in a file.
_FACTORIES: dict[str, type | None] = {
    "none": None,
    **{one.__name__: one for one in (bool, dict, float, int, list, set, str, tuple)},
}


def _default_apart(encoder: TreeWriter, values: defaultdict[Any, Any], path: TreePath) -> list[Any]:
    names = [name for name, factory in _FACTORIES.items() if factory is values.default_factory]
    if not names:
        raise encoder.refused(values.default_factory, (*path, "default_factory"))
    return [names[0], encoder.mapping(values, path)]


def _default(decoder: TreeReader, node: Any, path: TreePath) -> defaultdict[Any, Any]:
    name, items = node
    return defaultdict(_FACTORIES[name], decoder.mapping(items, path))


def _deque_apart(encoder: TreeWriter, values: deque[Any], path: TreePath) -> list[Any]:
    return [encoder.items(values, path), values.maxlen]


def _deque(decoder: TreeReader, node: Any, path: TreePath) -> deque[Any]:
    items, most = node
    return deque(decoder.items(items, path), most)


# Times


def _clock_apart(encoder: TreeWriter, value: datetime | time, path: TreePath) -> list[Any]:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise encoder.refused(value.tzinfo, (*path, "tzinfo"))
    return [value.isoformat(), value.fold]


def _datetime(_: TreeReader, node: Any, __: TreePath) -> datetime:
    text, fold = node
    return datetime.fromisoformat(text).replace(fold=fold)


def _time(_: TreeReader, node: Any, __: TreePath) -> time:
    text, fold = node
    return time.fromisoformat(text).replace(fold=fold)


#: The kinds that are recognised by the exact type of a value.
KINDS: dict[type, Kind] = {
    int: Kind("$int", lambda _, value, __: hex(value), lambda _, node, __: int(node, 16)),
    float: Kind("$float", _float_apart, _float),
    complex: Kind("$complex", _complex_apart, _complex),
    bytes: Kind("$bytes", _bytes_apart, _bytes),
    bytearray: Kind(
        "$bytearray", _bytes_apart, lambda decoder, node, path: bytearray(_bytes(decoder, node, path))
    ),
    tuple: Kind(
        "$tuple",
        lambda encoder, values, path: encoder.items(values, path),
        lambda decoder, node, path: tuple(decoder.items(node, path)),
    ),
    set: Kind(
        "$set",
        lambda encoder, values, path: encoder.members(values, path),
        lambda decoder, node, path: set(decoder.members(node, path)),
    ),
    frozenset: Kind(
        "$frozenset",
        lambda encoder, values, path: encoder.members(values, path),
        lambda decoder, node, path: frozenset(decoder.members(node, path)),
    ),
    deque: Kind("$deque", _deque_apart, _deque),
    OrderedDict: Kind("$ordered", _ordered_apart, _ordered),
    defaultdict: Kind("$default", _default_apart, _default),
    Counter: Kind(
        "$counter",
        lambda encoder, values, path: encoder.mapping(values, path),
        lambda decoder, node, path: Counter(decoder.mapping(node, path)),
    ),
    datetime: Kind("$datetime", _clock_apart, _datetime),
    date: Kind("$date", lambda _, value, __: value.isoformat(), lambda _, node, __: date.fromisoformat(node)),
    time: Kind("$time", _clock_apart, _time),
    timedelta: Kind(
        "$timedelta",
        lambda _, value, __: [value.days, value.seconds, value.microseconds],
        lambda _, node, __: timedelta(*node),
    ),
    type(FilePath()): Kind("$path", lambda _, value, __: str(value), lambda _, node, __: FilePath(node)),
}


# Numbers and types of torch and NumPy. Torch's are made if torch is imported.


def of_framework(value: Any) -> tuple[str, Any] | None:
    """Return the tag and the node of a scalar, a dtype, a size or a device. None for other values."""
    kind = type(value)
    if kind.__module__ == "torch":
        if kind.__name__ == "Size":
            return "$size", [*value]
        return (f"${kind.__name__}", str(value)) if kind.__name__ in ("dtype", "device") else None
    numpy = modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.dtype):
        return None
    if isinstance(value, numpy.dtype):
        return ("$dtype", f"numpy.{value.name}") if _is_known(value) else None
    little = value.dtype.newbyteorder("<")
    return (
        ("$scalar", [value.dtype.name, value.astype(little).tobytes().hex()])
        if _is_known(value.dtype)
        else None
    )


def _is_known(dtype: Any) -> bool:
    try:
        return bool(_numpy_dtype(dtype.name) == dtype)
    except (ValueError, TypeError, AttributeError, ImportError):
        return False


def _numpy_dtype(name: str) -> Any:
    """Return the dtype with this name, which NumPy or ml_dtypes has for numbers."""
    import numpy

    if name in _NUMBERS:
        return numpy.dtype(name)
    import ml_dtypes

    found = numpy.dtype(getattr(ml_dtypes, name))
    # 2 means that another package has registered it.
    if found.isbuiltin != 2 or found.name != name:
        raise ValueError(f"ml_dtypes has no dtype {name!r}")
    return found


_NUMBERS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    + ("float16", "float32", "float64", "complex64", "complex128")
)


def _scalar(_: TreeReader, node: Any, __: TreePath) -> Any:
    import numpy

    name, digits = node
    (found,) = numpy.frombuffer(bytes.fromhex(digits), _numpy_dtype(name))
    return found


def _dtype(decoder: TreeReader, node: Any, path: TreePath) -> Any:
    package, _, name = node.partition(".")
    if package == "numpy":
        return _numpy_dtype(name)
    torch = modules.get("torch")
    if torch is None:
        return decoder.noted(node, path, "torch.dtype")
    # `getattr` would import modules of torch with such a name.
    found = vars(torch).get(name)
    if type(found) is not torch.dtype:
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _size(decoder: TreeReader, node: Any, path: TreePath) -> Any:
    sizes, torch = decoder.items(node, path), modules.get("torch")
    return decoder.noted(tuple(sizes), path, "torch.Size") if torch is None else torch.Size(sizes)


def _device(decoder: TreeReader, node: Any, path: TreePath) -> Any:
    torch = modules.get("torch")
    return decoder.noted(str(node), path, "torch.device") if torch is None else torch.device(node)


#: The functions that decode the value of each tag.
TOGETHER: dict[str, Callable[[TreeReader, Any, TreePath], Any]] = {
    **{kind.tag: kind.together for kind in KINDS.values()},
    "$scalar": _scalar,
    "$dtype": _dtype,
    "$size": _size,
    "$device": _device,
}
