"""Flax's msgpack files, which `flax.serialization.to_bytes` returns.

https://github.com/msgpack/msgpack/blob/master/spec.md. Long runs of bytes stay in the file, so that a
checkpoint need not fit into memory.
"""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES
from ingot._convert.flatten import MAX_DEPTH, flatten
from ingot._convert.limits import OBJECT_NBYTES, VALUE_NBYTES
from ingot._convert.source import Contents, Entry, Raw, Region, Stream, raw_bytes, raw_nbytes
from ingot._convert.values import dtype_of, no_dtype

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

# The number of remaining bytes of the file, if at least this many remain.
_SPAN_NBYTES = 1 << 12
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte to the format of a number, or to a kind of value and the format of its length.
_FORMS = (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")
_NUMBERS = dict(zip(range(0xCA, 0xD4), _FORMS, strict=True))
_LENGTHS = {
    first + number: (kind, form)
    for first, kind, forms in (
        (0xC4, "bytes", (">B", ">H", ">I")),
        (0xC7, "extension", (">B", ">H", ">I")),
        (0xD9, "text", (">B", ">H", ">I")),
        (0xDC, "list", (">H", ">I")),
        (0xDE, "dict", (">H", ">I")),
    )
    for number, form in enumerate(forms)
}
# The numbers with which flax marks arrays and NumPy's scalars. 2 is a complex number of Python's.
_NDARRAY, _SCALAR = 1, 3
# Flax's mark of an array of more than 1 GiB, which it cuts.
_CUT = "__msgpack_chunked_array__"


class Extension(NamedTuple):
    """A value of a kind that the writing program defines."""

    kind: int
    data: Raw


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Raw, ...]


def read(contents: Contents) -> None:
    """Add the arrays of nested dicts, named as `ingot._convert.flatten` documents."""
    with contents.reading(), open(contents.path, "rb") as file:
        stream = Stream(contents.path, file)
        tree = _arrays(stream, load(stream, contents.budget), contents.budget)
    flatten(contents, tree, lambda value: isinstance(value, _Array), partial(_entry, contents))
    contents.metadata["format"] = "flax"


def load(stream: Stream, budget: Budget) -> Any:
    """Return the one value in a stream."""
    value = _Reader(stream, budget).value(0)
    stream.expect_end()
    return value


class _Reader:
    def __init__(self, stream: Stream, budget: Budget) -> None:
        self._stream = stream
        self._budget = budget

    def value(self, depth: int) -> Any:
        self._budget.hold(VALUE_NBYTES)
        first = self._stream.read(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self._stream.number(_NUMBERS[first])
        if first in _LENGTHS:
            kind, form = _LENGTHS[first]
            return self._sized(kind, self._stream.number(form), depth)
        if first < 0xA0:
            return self._sized("dict" if first < 0x90 else "list", first & 0xF, depth)
        if first < 0xC0:
            return self._sized("text", first & 0x1F, depth)
        if 0xD4 <= first <= 0xD8:
            return self._sized("extension", 1 << (first - 0xD4), depth)
        raise ValueError(f"byte 0x{first:02x} begins no value")

    def _sized(self, kind: str, length: int, depth: int) -> Any:
        if kind == "bytes":
            return self._bytes(length)
        if kind == "text":
            return self._stream.read(length).decode()
        self._budget.hold(OBJECT_NBYTES)
        if kind == "extension":
            return Extension(self._stream.number(">b"), self._bytes(length))
        # Each item takes a byte or more.
        self._stream.check(length)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels, which is the limit")
        if kind == "list":
            return [self.value(depth + 1) for _ in range(length)]
        found: dict[Any, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int, bytes)):
                raise ValueError(f"a key is {type(key).__name__}: expected text or a number")
            if key in found:
                raise ValueError(f"key {key!r} is there twice")
            found[key] = self.value(depth + 1)
        return found

    def _bytes(self, length: int) -> Raw:
        if length < _SPAN_NBYTES or not self._stream.has_spans:
            return self._stream.read(length)
        self._budget.hold(OBJECT_NBYTES)
        return self._stream.span(length)


def _arrays(stream: Stream, tree: Any, budget: Budget) -> Any:
    """Return the tree with arrays for their packed forms, in the same dicts and lists."""
    if isinstance(tree, Extension) and tree.kind in (_NDARRAY, _SCALAR):
        shape, dtype, data = load(_inner(stream, tree.data), budget)
        return _Array(tuple(int(size) for size in shape), str(dtype), (data,))
    if isinstance(tree, dict) and _CUT in tree:
        return _whole(stream, tree, budget)
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            tree[key] = _arrays(stream, value, budget)
    return tree


def _inner(stream: Stream, data: Raw) -> Stream:
    """Return the data of an extension as a stream."""
    if isinstance(data, Region):
        return stream.part(data)
    return Stream(stream.path, BytesIO(data), end=len(data), has_spans=False)


def _whole(stream: Stream, cut: dict[Any, Any], budget: Budget) -> _Array:
    others = cut.keys() - {_CUT, "shape", "chunks"}
    if others:
        raise ValueError(f"an array in parts has {len(others)} other keys beside them")
    shape, chunks = cut["shape"], cut["chunks"]
    parts = [_arrays(stream, chunks[str(number)], budget) for number in range(len(chunks))]
    if any(part.dtype != parts[0].dtype for part in parts):
        raise ValueError("an array has parts of several dtypes")
    sizes = [int(shape[str(axis)]) for axis in range(len(shape))]
    return _Array(tuple(sizes), parts[0].dtype, tuple(part.parts[0] for part in parts))


def _entry(contents: Contents, name: str, array: _Array) -> Entry:
    code = CODES.get(array.dtype)
    if code is None:
        raise no_dtype(contents.path, name, array.dtype)
    contents.expect(name, code, array.shape, sum(map(raw_nbytes, array.parts)))

    def values() -> Array:
        parts = [raw_bytes(part, name) for part in array.parts]
        whole = parts[0] if len(parts) == 1 else numpy.concatenate(parts)
        return whole.view(dtype_of(code)).reshape(array.shape)

    return Entry(name, code, array.shape, values)
