"""Tensors by address, as upstream's `serialize` takes them."""

from __future__ import annotations

import ingot
from ingot._dtypes import CODES, F4_PACKED
from ingot._serialize import unpacked
from ingot.errors import SaveError, _quoted

from ._wording import reading, writing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from typing_extensions import Buffer

    from ingot._serialize import Path

_NAMES = {**CODES, F4_PACKED: "F4"}


class TensorSpec:
    """A tensor by the address of its bytes.

    Parameters
    ----------
    dtype : str
        A framework's name for it, such as ``"float32"``.
    shape : sequence of int
        The shape. For ``"float4_e2m1fn_x2"`` the packed one; its last dimension is doubled.
    data_ptr, data_len : int
        The address and the size in bytes. The memory must stay what and where it is while it is written:
        nothing can check that. `ingot.serialize` takes buffers, which keep their memory alive.
    """

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        code = _NAMES.get(dtype)
        if code is None:
            raise SaveError(
                f'Unknown dtype "{dtype}". Supported dtypes: {", ".join(_NAMES)}',
                code="unknown-dtype",
                expected=tuple(_NAMES),
                found=dtype,
            )
        dims = list(shape)
        if any(dim < 0 for dim in [*dims, data_ptr, data_len]):
            raise OverflowError("can't convert negative int to unsigned")
        self._dtype = code
        self._shape = unpacked("", dims) if code == "F4" and dims else dims
        self._data_ptr = data_ptr
        self._data_len = data_len

    @property
    def dtype(self) -> str:
        """The code that stands in the header, such as ``"F32"``."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape that stands in the header."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the bytes."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The number of bytes."""
        return self._data_len

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("cannot pickle a TensorSpec: its address means nothing elsewhere")

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self.shape}, "
            f"data_ptr={self.data_ptr}, data_len={self.data_len})"
        )


@writing
def serialize(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Give the bytes of a file.

    Parameters
    ----------
    tensor_dict : dict of str to TensorSpec
        The tensors. A dict with ``"dtype"``, ``"shape"`` and ``"data"``, as 0.7 took, does as well.
    metadata : dict of str to str, optional
        Text to store beside them.
    """
    return ingot.serialize(_buffers(tensor_dict), metadata)


@writing
def serialize_file(
    tensor_dict: Mapping[str, Any], filename: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file. The parameters are those of `serialize` and its name."""
    ingot.serialize_file(_buffers(tensor_dict), filename, metadata, format="safetensors")


@reading("Error while deserializing")
def deserialize(bytes: Buffer) -> list[tuple[str, dict[str, Any]]]:
    """Take the tensors out of the bytes of a file: pairs of a name and its dtype, shape and data."""
    return ingot.deserialize(bytes)


def _buffers(tensors: Any) -> Any:
    """`tensors`, with a buffer for each `TensorSpec`. What is no dict is refused further down."""
    if not hasattr(tensors, "items"):
        return tensors
    return {
        name: _buffer(name, tensor) if isinstance(tensor, TensorSpec) else tensor
        for name, tensor in tensors.items()
    }


def _buffer(name: str, spec: TensorSpec) -> dict[str, Any]:
    # Not needed to read files, and slow to import.
    import ctypes

    if spec.data_len and not spec.data_ptr:
        raise SaveError(f"tensor {_quoted(name)}: its address is 0", code="no-values", tensor=name)
    data = (ctypes.c_char * spec.data_len).from_address(spec.data_ptr) if spec.data_len else b""
    return {"dtype": spec.dtype, "shape": spec.shape, "data": data}
