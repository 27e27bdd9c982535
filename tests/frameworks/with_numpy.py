"""NumPy, bound to the framework suite."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy

import ingot.numpy

from .suite import Binding, Layout, lacking


def numpy_dtype(code: str) -> numpy.dtype[Any]:
    name = ingot.numpy.DTYPES.get(code)
    return numpy.dtype(name if name else getattr(ml_dtypes, ingot.numpy.ML_DTYPES[code]))


def numpy_build(code: str, data: bytes, shape: tuple[int, ...]) -> Any:
    raw = numpy.frombuffer(bytearray(data), numpy.uint8)
    if code == "F4":
        raw = numpy.stack([raw & 0xF, raw >> 4], axis=-1).reshape(-1)
    return raw.view(numpy_dtype(code)).reshape(shape)


def numpy_bytes(code: str, array: Any) -> bytes:
    packed = numpy.ascontiguousarray(array).reshape(-1)
    if code != "F4":
        return packed.astype(packed.dtype.newbyteorder("<")).tobytes()
    nibbles = packed.view(numpy.uint8).reshape(-1, 2)
    return (nibbles[:, 0] | nibbles[:, 1] << 4).astype(numpy.uint8).tobytes()


# TensorFlow may hold ml_dtypes to a version that lacks them.
YOUNG = {"F4": "float4_e2m1fn", "F8_E8M0": "float8_e8m0fnu"}
LACKING = lacking(YOUNG, partial(hasattr, ml_dtypes))

BINDING = Binding(
    module=ingot.numpy,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit", **LACKING},
    build=numpy_build,
    bytes_of=numpy_bytes,
    shape_of=lambda code, array: list(array.shape),
    dtype_of=numpy_dtype,
    table=(ingot.numpy.DTYPES | ingot.numpy.ML_DTYPES).keys() - LACKING.keys(),
    layouts={
        "reversed": Layout((4, 3, 2), lambda array: array[::-1]),
        "broadcast": Layout((1, 2), lambda array: numpy.broadcast_to(array, (3, array.shape[1]))),
        "fortran": Layout((2, 3, 4), view=lambda array: array.copy(order="F")),
        "big-endian": Layout((2, 3, 4), view=lambda array: array.astype(array.dtype.newbyteorder(">"))),
    },
)
