"""Saving what is not in the memory of the host: a piece at a time, as it is written."""

from __future__ import annotations

import numpy

from . import numpy as arrays

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ._save import Box


def payload(
    name: str, dtype: Any, shape: tuple[int, ...], part: Callable[[Box], arrays.Array]
) -> tuple[str, tuple[int, ...], Callable[[int, int], arrays.Array]]:
    """As NumPy's `payload`, of an array of `dtype` and `shape` that `part` gives, a box at a time."""
    # One of that shape which takes no memory tells whether the format has it.
    code, shape, _ = arrays.payload(name, numpy.broadcast_to(numpy.zeros((), dtype), shape))
    size = numpy.dtype(dtype).itemsize

    def fetch(begin: int, end: int) -> arrays.Array:
        # Of F4, two elements make a byte.
        first, last = (2 * begin, 2 * end) if code == "F4" else (begin // size, -(-end // size))
        _, _, data = arrays.payload(name, arrays.gathered(shape, first, last, part))
        if callable(data):
            return data(0, end - begin)  # type: ignore[no-any-return]
        skipped = begin - first * size
        return numpy.ascontiguousarray(data).view(numpy.uint8)[skipped : skipped + end - begin]

    return code, shape, fetch
