"""The expected contents of a file, and a simple reader without ingot for its actual contents."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

Array = numpy.ndarray[Any, numpy.dtype[Any]]
Tensors = dict[str, Array]

# By their codes in a header. bintensors has all of them too.
DTYPES = {"U8": "u1", "I16": "<i2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "BOOL": "?"}
CODES = {numpy.dtype(dtype): code for code, dtype in DTYPES.items()}


def numbered(number: int, dtype: str, shape: Sequence[int]) -> Array:
    """Return an array whose values are almost unique to `number` and to their position."""
    values = (numpy.arange(math.prod(shape)) * 7 + number * 13) % 113
    return values.astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Model:
    """The expected contents of a file or of a checkpoint in a folder. Immutable."""

    tensors: Tensors
    #: None for a checkpoint, whose index and files each have metadata.
    metadata: dict[str, str] | None


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Return the caller's metadata, without the records that ingot adds about tensors."""
    return {
        key: text for key, text in (metadata or {}).items() if not key.startswith(("ingot.", "modelspec."))
    }


def read_plainly(path: Path) -> Model:
    """Read a safetensors file without ingot."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = texts(header.pop("__metadata__", {}))
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = numpy.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return Model(tensors, metadata)
