"""Arrays of ml_dtypes as such that numpy itself has."""

from __future__ import annotations

import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .sources import Array


def widened(array: Array) -> Array:
    """The same values in a dtype of numpy's own: those of bfloat16 and smaller floats in float32, exactly."""
    # A dtype that was registered, and is no record.
    return array.astype(numpy.float32) if array.dtype.isbuiltin == 2 else array
