"""Tensors by address, as upstream's `serialize` takes them."""

from __future__ import annotations

import ingot
from ingot._dtypes import CODES, F4_PACKED
from ingot._options import unpacked
from ingot._text import _quoted
from ingot.errors import SaveError

from ._arguments import not_an_instance, number, numbers
from ._wording import reading, writing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from typing_extensions import Buffer

    from ingot.typing import Path

_NAMES = {**CODES, F4_PACKED: "F4"}
# In the order in which upstream lists them.
LISTED = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex64",
)


def unknown_dtype(name: str) -> str:
    """What upstream says of the name of a dtype that it does not know."""
    return f'Unknown dtype "{name}". Supported dtypes: {", ".join(LISTED)}'


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
        if not isinstance(dtype, str):
            raise TypeError(f"argument 'dtype': {not_an_instance(dtype, 'str')}")
        code = _NAMES.get(dtype)
        if code is None:
            raise SaveError(
                unknown_dtype(dtype),
                code="unknown-dtype",
                expected=tuple(_NAMES),
                found=dtype,
            )
        dims = numbers("shape", shape)
        self._dtype = code
        self._shape = unpacked("", dims) if code == "F4" and dims else dims
        self._data_ptr = number("data_ptr", data_ptr)
        self._data_len = number("data_len", data_len)

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
