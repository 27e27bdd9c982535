"""The values of converted tensors: dtypes in files, conversion to other dtypes, and cutting into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from ingot import _native
from ingot import numpy as arrays
from ingot._base.blocks import blocks
from ingot._base.dtypes import CODES, F4_LOOSE, NAMES
from ingot._base.frameworks import installing
from ingot._base.frameworks import lacks as framework_lacks
from ingot._base.text import _escaped
from ingot._read import load, select
from ingot._read.door import PLAIN
from ingot.errors import ConversionError

from .limits import refused

if TYPE_CHECKING:
    from ingot.numpy import Array

    Index = tuple[Any, ...]

_TOO_MANY = 1 << 64
# The number of bytes that are converted or compared at a time.
PIECE_NBYTES = 16 << 20


def dtype_of(code: str) -> numpy.dtype[Any]:
    """Return NumPy's dtype for a code. Raises `ModuleNotFoundError` if it needs ml_dtypes."""
    plain = arrays.DTYPES.get(code)
    if plain is not None:
        return numpy.dtype(plain)
    if code not in arrays.ML_DTYPES:
        raise framework_lacks("numpy", code)
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"converting {code} needs ml_dtypes, which is not installed: {installing('convert')}",
            name="ml_dtypes",
        ) from error
    found: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, arrays.ML_DTYPES[code]))
    return found


def code_of(path: str, name: str, dtype: numpy.dtype[Any]) -> str | None:
    """Return the code for an array of that dtype, or None if it does not hold numbers.

    Raises
    ------
    ConversionError
        The values are numbers of a kind that files of tensors do not support, such as 128-bit complex
        numbers.
    """
    if dtype.kind in "OSUMmT" or (dtype.kind == "V" and dtype.isbuiltin != 2):
        return None
    word = dtype.newbyteorder("=").name
    if word == F4_LOOSE:
        return "F4"
    code = CODES.get(word)
    if code is None:
        raise no_dtype(path, name, word)
    return code


def no_dtype(path: str, name: str, dtype: str) -> ConversionError:
    """Return the error for a tensor with a dtype that FORMAT.md lacks."""
    known = tuple(NAMES.values())
    reason = f"files of tensors do not support {_escaped(dtype)}: expected one of {', '.join(known)}"
    return refused(path, f"{reason} — drop=[…] leaves it out", "unsupported-dtype", name, known, dtype)


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape, or 2⁶⁴ if there are more.

    Files may claim any shape, and the product of a million large numbers takes minutes.
    """
    count = 1
    for size in shape:
        count *= size
        if count >= _TOO_MANY:
            # The count is 0 if a later dimension is 0.
            return _TOO_MANY if all(shape) else 0
    return count


def itemsize(code: str) -> int:
    """Return the bytes of an element, without ml_dtypes. Two elements of F4 share a byte."""
    plain = arrays.DTYPES.get(code)
    return numpy.dtype(plain).itemsize if plain is not None else 2 if code == "BF16" else 1


def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in a file."""
    nbits = 4 if code == "F4" else itemsize(code) * 8
    return (elements(shape) * nbits + 7) // 8


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Yield indices that cut an array into pieces of about `PIECE_NBYTES`, in C order."""
    if prod(shape):
        # Two elements of F4 share a byte.
        yield from blocks(shape, PIECE_NBYTES // itemsize, 2)


def stored(array: Array) -> memoryview:
    """Return the bytes of an array as in a file: in C order, little-endian."""
    held: Any
    code, _, held = arrays.payload("", numpy.ascontiguousarray(array))
    # A function returns bytes that have to be swapped or packed first.
    whole = numpy.asarray(held(0, nbytes(code, array.shape)) if callable(held) else held)
    return whole.reshape(-1).view(numpy.uint8).data


def cast(array: Array, code: str) -> Array:
    """Return the array in another floating-point dtype, with the values of `load_file(dtype=)`."""
    checkpoint = _native.Checkpoint.from_buffer(arrays.save({"array": array}))
    selected: select.Selected[Array] = select.Selected(dtype=code)
    found: Array = load.chosen(checkpoint, selected, arrays.wrap, None, PLAIN, arrays.at)["array"]
    return found


def unpacked(raw: Array) -> Array:
    """Return one element of F4 to a byte, as NumPy has them. The first of a byte is in its lower half."""
    halves = numpy.stack([raw & 15, raw >> 4], -1)
    return halves.reshape((*raw.shape[:-1], raw.shape[-1] * 2) if raw.ndim else (2,)).view(dtype_of("F4"))
