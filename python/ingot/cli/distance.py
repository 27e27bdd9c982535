"""How far apart the values of two tensors are."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Array = numpy.ndarray[Any, numpy.dtype[Any]]

# Elements that are compared at once, so that what is made of them stays in the cache.
_STEP = 1 << 18


class Distance(NamedTuple):
    """How two tensors of one shape differ. NaN where a value is not finite in one of them only."""

    different: int
    """Elements that are not equal. NaN equals NaN here."""
    max_abs: float
    relative_l2: float | None
    """The norm of the difference over that of the first; None where that is zero."""
    cosine: float | None
    """Of the angle between the two; None where one is zero."""


def distance(one: Array, two: Array, step: Callable[[int], None]) -> Distance | None:
    """Compare two arrays of one shape; None where all elements are equal.

    `step` is told how many bytes of `one` have been compared.
    """
    flat, other = one.reshape(-1), two.reshape(-1)
    if flat.dtype == other.dtype and _same_bytes(flat, other):
        step(flat.nbytes)
        return None
    different, largest, sums = 0, 0.0, numpy.zeros(4)
    for at in range(0, flat.size, _STEP):
        ours, theirs = flat[at : at + _STEP], other[at : at + _STEP]
        step(ours.nbytes)
        a, b = _comparable(ours), _comparable(theirs)
        with numpy.errstate(invalid="ignore", over="ignore"):
            unequal = (a != b) & ~((a != a) & (b != b))
            different += int(numpy.count_nonzero(unequal))
            # Equal infinities are no distance apart, and their difference is no number.
            apart = numpy.where(unequal, a - b, 0.0)
            # numpy's maximum is NaN where one value is.
            largest = float(numpy.maximum(largest, numpy.abs(apart).max()))
            sums += numpy.dot(apart, apart), numpy.dot(a, a), numpy.dot(b, b), numpy.dot(a, b)
    if not different:
        return None
    squares, of_one, of_two, product = map(float, sums)
    norms = sqrt(of_one) * sqrt(of_two)
    return Distance(
        different,
        largest,
        sqrt(squares) / sqrt(of_one) if of_one else None,
        max(-1.0, min(1.0, product / norms)) if norms else None,
    )


def _same_bytes(flat: Array, other: Array) -> bool:
    steps = ((flat[at : at + _STEP], other[at : at + _STEP]) for at in range(0, flat.size, _STEP))
    return all(numpy.array_equal(a.view(numpy.uint8), b.view(numpy.uint8)) for a, b in steps)


def _comparable(part: Array) -> Array:
    """The values in 64 bits. Complex ones as their parts."""
    return parts(part).reshape(-1).astype(numpy.float64)


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
