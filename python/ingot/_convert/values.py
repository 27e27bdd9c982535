"""Values: which dtype they have in a file, a piece of them at a time, and in another dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from ingot import _native
from ingot import numpy as arrays
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
# What is converted or compared at a time.
PIECE_NBYTES = 16 << 20


def dtype_of(code: str) -> numpy.dtype[Any]:
    """NumPy's dtype for a code. `ModuleNotFoundError` where ml_dtypes has it and is not installed."""
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
    """The code for an array of that dtype; None where it holds no numbers.

    Raises
    ------
    ConversionError
        They are numbers of a kind that no file of tensors has, such as 128-bit complex ones.
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
    """The refusal of a tensor whose dtype the file format lacks."""
    return refused(
        path,
        f"no file of tensors has a dtype for {_escaped(dtype)}: "
        f"expected one of {', '.join(NAMES.values())} — drop=[…] leaves it out",
        code="unsupported-dtype",
        tensor=name,
        expected=tuple(NAMES.values()),
        found=dtype,
    )


def nbits(code: str) -> int:
    """The size of an element in a file."""
    return 4 if code == "F4" else dtype_of(code).itemsize * 8


def elements(shape: Sequence[int]) -> int:
    """How many elements a shape has, or 2⁶⁴ where there are more.

    Files claim any shape they like, and the product of a million large numbers takes minutes.
    """
    count = 1
    for size in shape:
        count *= size
        if count >= _TOO_MANY:
            # None, if a dimension is yet to come that is 0.
            return _TOO_MANY if all(shape) else 0
    return count


def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor in a file."""
    return (elements(shape) * nbits(code) + 7) // 8


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Indices that cut an array into pieces of about `PIECE_NBYTES`, in C order."""
    if not prod(shape):
        return
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * itemsize
        if size > 1 and size * inner > PIECE_NBYTES:
            # Even, because two elements of F4 share a byte.
            step = max(PIECE_NBYTES // inner // 2 * 2, 2 if axis == len(shape) - 1 else 1)
            outer = prod(shape[:axis])
            for place in range(outer):
                at = tuple(int(one) for one in numpy.unravel_index(place, shape[:axis])) if axis else ()
                for first in range(0, size, step):
                    yield (*at, slice(first, min(first + step, size)))
            return
    yield ()


def stored(array: Array) -> memoryview:
    """The bytes of an array as a file holds them: in C order, little-endian."""
    held: Any
    code, _, held = arrays.payload("", numpy.ascontiguousarray(array))
    # Functions give what has to be turned or packed first.
    whole = numpy.asarray(held(0, nbytes(code, array.shape)) if callable(held) else held)
    return whole.reshape(-1).view(numpy.uint8).data


def cast(array: Array, code: str) -> Array:
    """The array in another floating-point dtype, with the values that `load_file(dtype=)` gives."""
    checkpoint = _native.Checkpoint.from_buffer(arrays.save({"array": array}))
    selected: select.Selected[Array] = select.Selected(dtype=code)
    found: Array = load.chosen(checkpoint, selected, arrays.wrap, None, PLAIN, arrays.at)["array"]
    return found
