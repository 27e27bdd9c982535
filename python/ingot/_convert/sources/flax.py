"""Flax's msgpack files: what `flax.serialization.to_bytes` gives."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES
from ingot._convert.flatten import MAX_DEPTH, flatten
from ingot._convert.limits import OBJECT_NBYTES, VALUE_NBYTES, reading, refused
from ingot._convert.source import Contents, Entry, Options, Region, size_of
from ingot._convert.values import dtype_of, nbytes, no_dtype

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array


# MessagePack. Long runs of bytes stay in the file, so that a checkpoint need not fit into memory.
#
# https://github.com/msgpack/msgpack/blob/master/spec.md


# Bytes that are worth a second visit to the file.
_SPAN_NBYTES = 1 << 12


class Extension(NamedTuple):
    """A value of a kind that the program defines which wrote it."""

    kind: int
    data: bytes | Region


class Malformed(ValueError):
    """The bytes are no MessagePack."""


# First byte to the format of a number or of a length; a length comes with the kind of its value.
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_LENGTHS = {
    0xC4: (">B", "bytes"),
    0xC5: (">H", "bytes"),
    0xC6: (">I", "bytes"),
    0xC7: (">B", "extension"),
    0xC8: (">H", "extension"),
    0xC9: (">I", "extension"),
    0xD9: (">B", "text"),
    0xDA: (">H", "text"),
    0xDB: (">I", "text"),
    0xDC: (">H", "list"),
    0xDD: (">I", "list"),
    0xDE: (">H", "dict"),
    0xDF: (">I", "dict"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def load(path: str, file: IO[bytes], budget: Budget) -> Any:
    """The one value that the file at `path` is."""
    reader = _Reader(path, file, 0, size_of(path), budget)
    value = reader.value(0)
    reader.expect_end()
    return value


def load_inner(path: str, data: bytes | Region, budget: Budget) -> Any:
    """The one value that the data of an extension is."""
    from io import BytesIO

    if isinstance(data, bytes):
        reader = _Reader(path, BytesIO(data), 0, len(data), budget, spans=False)
        value = reader.value(0)
        reader.expect_end()
        return value
    with open(path, "rb") as file:
        reader = _Reader(path, file, data.position, data.position + data.nbytes, budget)
        value = reader.value(0)
        reader.expect_end()
        return value


class _Reader:
    def __init__(
        self, path: str, file: IO[bytes], begin: int, end: int, budget: Budget, spans: bool = True
    ) -> None:
        self._path = path
        self._budget = budget
        self._file = file
        self._at = begin
        self._end = end
        self._spans = spans
        file.seek(begin)

    def expect_end(self) -> None:
        if self._at != self._end:
            raise Malformed(f"{self._end - self._at} bytes follow the value")

    def value(self, depth: int) -> Any:
        self._budget.hold(VALUE_NBYTES)
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self._dict(first & 0xF, depth)
        if first < 0xA0:
            return self._list(first & 0xF, depth)
        if first < 0xC0:
            return self._take(first & 0x1F).decode()
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self._unpack(_NUMBERS[first])
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4))
        if first not in _LENGTHS:
            raise Malformed(f"byte 0x{first:02x} begins no value")
        form, what = _LENGTHS[first]
        return self._sized(what, self._unpack(form), depth)

    def _sized(self, what: str, length: int, depth: int) -> Any:
        if what == "bytes":
            return self._bytes(length)
        if what == "text":
            return self._take(length).decode()
        if what == "extension":
            return self._extension(length)
        return self._list(length, depth) if what == "list" else self._dict(length, depth)

    def _list(self, length: int, depth: int) -> list[Any]:
        self._budget.hold(OBJECT_NBYTES)
        self._check(length, depth)
        return [self.value(depth + 1) for _ in range(length)]

    def _dict(self, length: int, depth: int) -> dict[Any, Any]:
        self._budget.hold(OBJECT_NBYTES)
        self._check(2 * length, depth)
        found: dict[Any, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int, bytes)):
                raise Malformed(f"a key is {type(key).__name__}: expected text or a number")
            if key in found:
                raise Malformed(f"key {key!r} stands there twice")
            found[key] = self.value(depth + 1)
        return found

    def _extension(self, length: int) -> Extension:
        self._budget.hold(OBJECT_NBYTES)
        kind = self._unpack(">b")
        return Extension(kind, self._bytes(length))

    def _bytes(self, length: int) -> bytes | Region:
        if not self._spans or length < _SPAN_NBYTES:
            return self._take(length)
        self._budget.hold(OBJECT_NBYTES)
        self._check(length, 0)
        region = Region(self._path, self._at, length)
        self._at += length
        self._file.seek(self._at)
        return region

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        self._check(length, 0)
        self._at += length
        return self._file.read(length)

    def _check(self, nbytes: int, depth: int) -> None:
        """At least so many bytes must follow."""
        if nbytes > self._end - self._at:
            raise Malformed(f"cut short: expected {nbytes} more bytes, found {self._end - self._at}")
        if depth > MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} levels, which is the limit")


TITLE = "a flax checkpoint"
# The numbers by which flax marks arrays and NumPy's scalars. 2 is a complex number of Python's.
_NDARRAY, _SCALAR = 1, 3
# Where flax marks an array of more than 1 GiB, which it cuts.
_CUT = "__msgpack_chunked_array__"


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[bytes | Region, ...]


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The arrays of nested dicts, named as `ingot._convert.flatten` says."""
    with reading(path, TITLE), open(path, "rb") as file:
        tree = _arrays(path, load(path, file, options.budget), options.budget)
    entries, left_out = flatten(path, tree, _is_array, partial(_entry, path), options.budget)
    yield Contents(entries, left_out, {"format": "flax"})


def _is_array(value: Any) -> bool:
    return isinstance(value, _Array)


def _arrays(path: str, tree: Any, budget: Budget) -> Any:
    """The tree with arrays for what flax packs them as, in the same dicts and lists."""
    if isinstance(tree, Extension) and tree.kind in (_NDARRAY, _SCALAR):
        shape, dtype, data = load_inner(path, tree.data, budget)
        return _Array(tuple(int(size) for size in shape), str(dtype), (data,))
    if isinstance(tree, dict) and _CUT in tree:
        return _whole(path, tree, budget)
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            tree[key] = _arrays(path, value, budget)
    return tree


def _whole(path: str, cut: dict[Any, Any], budget: Budget) -> _Array:
    others = cut.keys() - {_CUT, "shape", "chunks"}
    if others:
        raise ValueError(f"an array in parts has {len(others)} other keys beside them")
    shape, chunks = cut["shape"], cut["chunks"]
    parts = [_arrays(path, chunks[str(number)], budget) for number in range(len(chunks))]
    if any(part.dtype != parts[0].dtype for part in parts):
        raise ValueError("an array has parts of several dtypes")
    sizes = [int(shape[str(axis)]) for axis in range(len(shape))]
    return _Array(tuple(sizes), parts[0].dtype, tuple(part.parts[0] for part in parts))


def _entry(path: str, name: str, array: _Array) -> Entry:
    code = CODES.get(array.dtype)
    if code is None:
        raise no_dtype(path, name, array.dtype)
    expected = nbytes(code, array.shape) if all(size >= 0 for size in array.shape) else -1
    found = sum(part.nbytes if isinstance(part, Region) else len(part) for part in array.parts)
    if expected != found:
        raise refused(
            path,
            f"shape {list(array.shape)} of {code} needs {expected} bytes, found {found}",
            code="size-mismatch",
            tensor=name,
            expected=expected,
            found=found,
        )
    return Entry(name, code, array.shape, partial(_values, name, code, array))


def _values(name: str, code: str, array: _Array) -> Array:
    parts = [
        part.read(name) if isinstance(part, Region) else numpy.frombuffer(part, numpy.uint8)
        for part in array.parts
    ]
    whole = parts[0] if len(parts) == 1 else numpy.concatenate(parts)
    return whole.view(dtype_of(code)).reshape(array.shape)
