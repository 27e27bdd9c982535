"""A tensor by its address, and the checks of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as integer
from typing import Any

from ingot._base.checks import unpacked
from ingot._base.dtypes import CODES, F4_PACKED
from ingot.errors import SaveError

_NAMES = {**CODES, F4_PACKED: "F4"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSpec:
    """A tensor by the address of its bytes.

    Parameters
    ----------
    dtype : str
        A framework's name for it, such as ``"float32"``. The attribute is the code in the header: ``"F32"``.
    shape : sequence of int
        The shape. For ``"float4_e2m1fn_x2"`` the packed one; its last dimension is doubled.
    data_ptr, data_len : int
        The address and the size in bytes. The memory must remain valid and unchanged while it is written,
        which cannot be checked. `ingot.serialize` takes buffers, which keep their memory alive.
    """

    dtype: str
    shape: Sequence[int]
    data_ptr: int
    data_len: int

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):
            raise TypeError(not_an_instance(self.dtype, "str"))
        code = _NAMES.get(self.dtype)
        if code is None:
            message = f"dtype {self.dtype!r} is unknown: expected one of {', '.join(_NAMES)}"
            raise SaveError(message, code="unknown-dtype", expected=tuple(_NAMES), found=self.dtype)
        shape: Any = self.shape
        if isinstance(shape, str) or not hasattr(shape, "__len__"):
            raise TypeError(not_an_instance(shape, "Sequence"))
        dims = [*map(number, shape)]
        given = {
            "dtype": code,
            "shape": unpacked("", dims) if code == "F4" and dims else dims,
            "data_ptr": number(self.data_ptr),
            "data_len": number(self.data_len),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("cannot pickle a TensorSpec: its address means nothing elsewhere")


def not_an_instance(value: object, kind: str) -> str:
    """Return upstream's message for a value of another type."""
    shown = "'None'" if value is None else f"{type(value).__name__!r} object"
    return f"{shown} is not an instance of {kind!r}"


def number(value: Any) -> int:
    """Return an unsigned integer of 64 bits. Raises the classes of errors that upstream raises."""
    found = integer(value)
    if not 0 <= found < 2**64:
        raise OverflowError(f"expected an integer from 0 to 2^64 - 1, found {found}")
    return found
