"""The names of `safetensors.paddle`."""

from __future__ import annotations

import numpy as np
import paddle

from ingot.compat._handles import MMAP, safe_open
from ingot.compat._specs import TensorSpec, deserialize, serialize, serialize_file
from ingot.errors import DtypeError, _quoted

from . import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from typing_extensions import Buffer

    from ingot._serialize import Path

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

_TYPES: dict[str, Any] = {
    "F64": paddle.float64,
    "F32": paddle.float32,
    "F16": paddle.float16,
    "BF16": paddle.bfloat16,
    "I64": paddle.int64,
    "I32": paddle.int32,
    "I16": paddle.int16,
    "I8": paddle.int8,
    "U8": paddle.uint8,
    "BOOL": paddle.bool,
    "F8_E4M3": paddle.float8_e4m3fn,
    "F8_E5M2": paddle.float8_e5m2,
    "C64": paddle.complex64,
}
_SIZE = {dtype: int(code[-2:]) // 8 if code[-2:].isdigit() else 1 for code, dtype in _TYPES.items()}
# What paddle takes from NumPy and gives to it for each dtype.
NPDTYPES: dict[Any, Any] = {
    paddle.float64: np.float64,
    paddle.float32: np.float32,
    paddle.float16: np.float16,
    paddle.bfloat16: np.float16,
    paddle.int64: np.int64,
    paddle.int32: np.int32,
    paddle.int16: np.int16,
    paddle.int8: np.int8,
    paddle.uint8: np.uint8,
    paddle.bool: bool,
    paddle.float8_e4m3fn: np.uint8,
    paddle.float8_e5m2: np.uint8,
    paddle.complex64: np.complex64,
}
# The dtypes that NumPy has by ml_dtypes only: what paddle takes their bytes for.
_RAW: dict[str, Any] = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def load_file(filename: Path, device: Any = "cpu", *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file."""
    return _np2paddle(numpy.load_file(filename, backend=backend), device)


def load(data: Buffer, device: str = "cpu") -> dict[str, Any]:
    """Load all tensors from the bytes of a file."""
    return _np2paddle(numpy.load(data), device)


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors."""
    return numpy.save(_paddle2np(tensors), metadata)


def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file."""
    numpy.save_file(_paddle2np(tensors), filename, metadata)


def _getdtype(dtype_str: str) -> Any:
    return _TYPES[dtype_str]


def _np2paddle(numpy_dict: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    return {name: _tensor(name, array, device) for name, array in numpy_dict.items()}


def _tensor(name: str, array: Any, device: Any) -> Any:
    dtype = array.dtype.name
    raw = _RAW.get(dtype)
    if raw is not None:
        tensor = paddle.to_tensor(array.view(raw), place=device)
        return tensor if dtype == "bfloat16" else tensor.view(getattr(paddle, dtype))
    # From NumPy it takes uint16 for bfloat16, and has no kernels for the wider ones.
    if dtype in ("uint16", "uint32", "uint64") or array.dtype.isbuiltin != 1:
        raise DtypeError(
            f"tensor {_quoted(name)}: paddle takes no array of dtype {dtype}",
            code="dtype-not-in-framework",
            tensor=name,
            found=dtype,
        )
    return paddle.to_tensor(array, place=device)


def _paddle2np(paddle_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: _array(tensor) for name, tensor in paddle_dict.items()}


def _array(tensor: Any) -> Any:
    array = tensor.detach().cpu().numpy()
    for name in _RAW:
        if tensor.dtype == getattr(paddle, name):
            # NumPy has these by ml_dtypes only, and paddle gives their bytes.
            import ml_dtypes

            return np.ascontiguousarray(array).view(getattr(ml_dtypes, name)).reshape(tensor.shape)
    return array


def _to_ndarray(tensor: Any, name: str) -> Any:
    return _array(tensor)


def _tobytes(tensor: Any, name: str) -> bytes:
    return numpy._tobytes(_array(tensor))


def _flatten(tensors: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """As 0.8 hands them to `serialize`: by their address. Who keeps the list keeps them alive."""
    return numpy._flatten(_paddle2np(tensors), keep_alive_buffer)


def _view2paddle(safeview: Iterable[tuple[str, Mapping[str, Any]]], device: str) -> dict[str, Any]:
    return _np2paddle(numpy._view2np(safeview), device)
