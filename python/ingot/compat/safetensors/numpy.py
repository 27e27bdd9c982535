"""The names of `safetensors.numpy`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot import numpy as _ingot
from ingot.compat._handles import MMAP, chosen, path_only, safe_open
from ingot.compat._specs import deserialize, serialize, serialize_file
from ingot.compat._tensor_spec import TensorSpec
from ingot.compat._wording import reading, writing

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

# Changes here have an effect on `load`, as they do upstream.
_TYPES: dict[str, Any] = {code: np.dtype(word).type for code, word in _ingot.DTYPES.items()} | {"BOOL": bool}
_FRESH = dict(_TYPES)


@reading("Error while deserializing header")
def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Array]:
    """Load all arrays of a file, as `ingot.numpy.load_file`."""
    return _ingot.load_file(path_only(filename), backend=chosen(backend))


@reading("Error while deserializing")
def load(data: Buffer) -> dict[str, Array]:
    """Load all arrays from the bytes of a file, as `ingot.numpy.load`."""
    if _TYPES != _FRESH:
        return _view2np(deserialize(data))
    return _ingot.load(data)


@writing
def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file that holds these arrays, as `ingot.numpy.save`."""
    return _ingot.save(tensor_dict, metadata)


@writing
def save_file(tensor_dict: dict[str, Array], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save arrays to a file, as `ingot.numpy.save_file`."""
    _ingot.save_file(tensor_dict, path_only(filename), metadata, format="safetensors")


def _getdtype(dtype_str: str) -> Any:
    if dtype_str not in _TYPES and dtype_str in _ingot.ML_DTYPES:
        return _ingot._resolve(dtype_str)
    return np.dtype(_TYPES[dtype_str])


def _view2np(safeview: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, view in safeview:
        dtype = _getdtype(view["dtype"])
        shape = tuple(view["shape"])
        if isinstance(dtype, np.dtype):
            found[name] = np.frombuffer(view["data"], dtype).reshape(shape)
        else:
            # Elements of less than a byte, to be unpacked.
            found[name] = dtype(np.frombuffer(view["data"], np.uint8), shape)
    return found


def _is_little_endian(tensor: Array) -> bool:
    order = tensor.dtype.byteorder
    return order in "<|" or (order == "=" and sys.byteorder == "little")


def _tobytes(tensor: Array) -> bytes:
    """Return the bytes of the array in C order, little-endian."""
    return _packed("", tensor)[1].tobytes()


def _packed(name: str, array: Array) -> tuple[tuple[int, ...], Array]:
    """Return the shape and the elements of a file, in memory."""
    code, shape, stored = _ingot.payload(name, array)
    if callable(stored):
        stored = stored(0, array.size // 2 if code == "F4" else array.nbytes)
    return shape, np.ascontiguousarray(stored)


def _flatten(tensor_dict: dict[str, Array], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Return the arrays by address, as 0.8 passes them to `serialize`. The list keeps their memory alive."""
    specs = {}
    for name, array in tensor_dict.items():
        shape, data = _packed(name, array)
        keep_alive_buffer.append(data)
        specs[name] = TensorSpec(
            dtype=array.dtype.name, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes
        )
    return specs
