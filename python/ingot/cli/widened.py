"""Arrays in dtypes that everybody has: floats of few bits, and complex numbers, as plain floats."""

from __future__ import annotations

import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .sources import Array


def widened(array: Array) -> Array:
    """The same values in a dtype of numpy's own: those of bfloat16 and smaller floats in float32, exactly."""
    # A dtype that was registered, and is no record.
    return array.astype(numpy.float32) if array.dtype.isbuiltin == 2 else array


def parts(array: Array) -> Array:
    """Complex numbers as pairs, along one more dimension; others as they are."""
    if array.dtype.kind != "c":
        return array
    half = numpy.dtype(f"f{array.itemsize // 2}")
    return numpy.ascontiguousarray(array).reshape(array.shape).view(half).reshape(*array.shape, 2)
