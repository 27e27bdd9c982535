"""A tensor by its address, and the checks of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as integer
from typing import Any

from ingot._base.checks import unpacked
from ingot._base.dtypes import CODES, F4_PACKED
from ingot.errors import SaveError

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
        The address and the size in bytes. The memory must remain valid and unchanged while it is written,
        which cannot be checked. `ingot.serialize` takes buffers, which keep their memory alive.
    """

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        if not isinstance(dtype, str):
            raise TypeError(f"argument 'dtype': {not_an_instance(dtype, 'str')}")
        code = _NAMES.get(dtype)
        if code is None:
            message = f"dtype {dtype!r} is unknown: expected one of {', '.join(_NAMES)}"
            raise SaveError(message, code="unknown-dtype", expected=tuple(_NAMES), found=dtype)
        dims = numbers("shape", shape)
        self._dtype = code
        self._shape = unpacked("", dims) if code == "F4" and dims else dims
        self._data_ptr = number("data_ptr", data_ptr)
        self._data_len = number("data_len", data_len)

    @property
    def dtype(self) -> str:
        """The code in the header, such as ``"F32"``."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape in the header."""
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


def not_an_instance(value: object, kind: str) -> str:
    """Return upstream's message for a value of another type."""
    shown = "'None'" if value is None else f"{type(value).__name__!r} object"
    return f"{shown} is not an instance of {kind!r}"


def number(name: str, value: Any) -> int:
    """Return an unsigned integer of 64 bits, or raise upstream's error."""
    try:
        found = integer(value)
    except TypeError as error:
        raise TypeError(f"argument {name!r}: {error}") from None
    if found < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if found >= 2**64:
        raise OverflowError("int too big to convert")
    return found


def numbers(name: str, value: Any) -> list[int]:
    """Return a list of such integers, or raise upstream's error."""
    if isinstance(value, str):
        raise TypeError(f"argument {name!r}: Can't extract `str` to `Vec`")
    if not hasattr(value, "__len__"):
        raise TypeError(f"argument {name!r}: {not_an_instance(value, 'Sequence')}")
    return [number(name, one) for one in value]
