"""The names of `safetensors.paddle`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ingot import paddle as _ingot
from ingot.compat._face import savers
from ingot.compat._handles import MMAP, chosen, path_only, safe_open
from ingot.compat._specs import deserialize, serialize, serialize_file
from ingot.compat._tensor_spec import TensorSpec
from ingot.compat._wording import reading

from . import numpy

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

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

# With upstream's keys, since programs build tables from them.
_TYPES: dict[str, Any] = {
    code: _ingot.DTYPES[code]
    for code in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")
}
_SIZE = {dtype: int(code[-2:]) // 8 if code[-2:].isdigit() else 1 for code, dtype in _TYPES.items()}
_SIZE[paddle.complex64] = 8
# NumPy's dtype in conversions from and to each dtype of paddle.
NPDTYPES: dict[Any, Any] = {
    dtype: numpy._TYPES.get(code, np.float16 if code == "BF16" else np.uint8)
    for code, dtype in _TYPES.items()
}
save_file, save = savers(__name__, _ingot)


@reading("Error while deserializing header")
def load_file(filename: Path, device: Any = "cpu", *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file, as `ingot.paddle.load_file`."""
    return _ingot.load_file(path_only(filename), device, backend=chosen(backend))


@reading("Error while deserializing")
def load(data: Buffer, device: str = "cpu") -> dict[str, Any]:
    """Load all tensors from the bytes of a file, as `ingot.paddle.load`."""
    return _ingot.load(data, device)


def _getdtype(dtype_str: str) -> Any:
    return _TYPES[dtype_str] if dtype_str in _TYPES else _ingot.DTYPES[dtype_str]


def _np2paddle(numpy_dict: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    found = load(numpy.save(numpy_dict), device)
    return {name: found[name] for name in numpy_dict}


def _paddle2np(paddle_dict: dict[str, Any]) -> dict[str, Any]:
    # By bytes, since paddle represents bfloat16 by NumPy's uint16.
    found = numpy.load(save(paddle_dict))
    return {name: found[name] for name in paddle_dict}


def _to_ndarray(tensor: Any, name: str) -> Any:
    return _paddle2np({name: tensor})[name]


def _tobytes(tensor: Any, name: str) -> bytes:
    return numpy._tobytes(_to_ndarray(tensor, name))


def _flatten(tensors: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Return the tensors by address, as 0.8 passes them to `serialize`. The list keeps their memory alive."""
    return numpy._flatten(_paddle2np(tensors), keep_alive_buffer)


def _view2paddle(safeview: Iterable[tuple[str, Mapping[str, Any]]], device: str) -> dict[str, Any]:
    return _np2paddle(numpy._view2np(safeview), device)
