"""The names of `safetensors.mlx`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ingot.compat._handles import MMAP, safe_open
from ingot.errors import DtypeError, _quoted

from . import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Buffer

    from ingot._serialize import Path

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]


def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file."""
    return _np2mx(numpy.load_file(filename, backend=backend))


def load(data: Buffer) -> dict[str, Any]:
    """Load all tensors from the bytes of a file."""
    return _np2mx(numpy.load(data))


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors."""
    return numpy.save(_mx2np(tensors), metadata)


def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file."""
    numpy.save_file(_mx2np(tensors), filename, metadata)


def _np2mx(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: _array(name, array) for name, array in numpy_dict.items()}


def _mx2np(mx_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: _bytes(array) for name, array in mx_dict.items()}


def _array(name: str, array: Any) -> Any:
    try:
        return mx.array(array)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DtypeError(
            f"tensor {_quoted(name)}: mlx has no dtype for {array.dtype}",
            code="dtype-not-in-framework",
            tensor=name,
            found=str(array.dtype),
        ) from error


def _bytes(array: Any) -> Any:
    if array.dtype != mx.bfloat16:
        return np.array(array)
    # NumPy knows bfloat16 by ml_dtypes only, and mlx does not hand it over.
    import ml_dtypes

    return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
