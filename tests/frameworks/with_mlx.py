"""mlx, bound to the framework suite."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy

import ingot.mlx

from .suite import BITS, Binding, Layout


def mlx_build(code: str, data: bytes, shape: tuple[int, ...]) -> mx.array:
    raw = mx.array(numpy.frombuffer(data, numpy.uint8))
    return raw.view(ingot.mlx.DTYPES[code]).reshape(shape)


def mlx_bytes(code: str, array: Any) -> bytes:
    assert isinstance(array, mx.array)
    return numpy.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


BINDING = Binding(
    module=ingot.mlx,
    refused={code: "mlx has no dtype for" for code in BITS if code.startswith(("F4", "F6_", "F8_"))},
    build=mlx_build,
    bytes_of=mlx_bytes,
    shape_of=lambda code, array: list(array.shape),
    dtype_of=ingot.mlx.DTYPES.__getitem__,
    table=ingot.mlx.DTYPES,
    layouts={
        "broadcast": Layout(
            (1, 2),
            lambda array: numpy.broadcast_to(array, (3, array.shape[1])),
            lambda array: mx.broadcast_to(array, (3, array.shape[1])),
        ),
        "reversed": Layout((4, 3, 2), lambda array: array[::-1]),
    },
)
