"""Flax's msgpack files: what `flax.serialization.to_bytes` gives."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES
from ingot._convert.flatten import flatten
from ingot._convert.msgpack import Extension, load, load_inner
from ingot._convert.positions import Region
from ingot._convert.refusal import reading, refused
from ingot._convert.source import Contents, Entry, Options
from ingot._convert.values import dtype_of, nbytes, no_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._convert.limits import Budget
    from ingot.numpy import Array

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
