"""Paddle, bound to the framework suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import paddle
from paddle.utils.dlpack import from_dlpack

import ingot.paddle

from .suite import LAYOUTS, Binding, Layout

# NumPy's names of the dtypes that NumPy has. Paddle returns the others as their bits.
DTYPES = {"U32": "uint32", "U64": "uint64"}


def paddle_build(code: str, data: bytes, shape: tuple[int, ...]) -> paddle.Tensor:
    raw = numpy.frombuffer(bytearray(data), numpy.uint8)
    if code in DTYPES:
        # Paddle has no `view` for them.
        return from_dlpack(raw.view(DTYPES[code]).reshape(shape).__dlpack__())
    if not data:
        # The oldest supported Paddle has no `view` of an empty tensor.
        return paddle.empty(shape, ingot.paddle.DTYPES[code])
    return from_dlpack(raw.__dlpack__()).view(ingot.paddle.DTYPES[code]).reshape(shape)


def paddle_bytes(code: str, tensor: Any) -> bytes:
    assert isinstance(tensor, paddle.Tensor)
    return numpy.ascontiguousarray(tensor.numpy()).tobytes()


def by_numpy(view: Callable[[Any], Any]) -> Callable[[paddle.Tensor], paddle.Tensor]:
    """Return a function that makes the view through NumPy, since Paddle cannot for the dtypes above."""

    def viewed(tensor: paddle.Tensor) -> paddle.Tensor:
        if tensor.dtype in (paddle.uint32, paddle.uint64):
            return from_dlpack(view(tensor.numpy()).__dlpack__())
        return view(tensor)

    return viewed


BINDING = Binding(
    module=ingot.paddle,
    refused=dict.fromkeys(
        ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16"), "paddle"
    ),
    build=paddle_build,
    bytes_of=paddle_bytes,
    shape_of=lambda code, tensor: list(tensor.shape),
    dtype_of=ingot.paddle.DTYPES.__getitem__,
    table=ingot.paddle.DTYPES,
    layouts={
        "transposed": Layout(
            (4, 2, 6), lambda array: array.swapaxes(0, 1), lambda tensor: tensor.transpose([1, 0, 2])
        ),
        "strided": Layout((4, 4), LAYOUTS["strided"].oracle, by_numpy(LAYOUTS["strided"].oracle)),
        "one-sized": Layout((1, 4, 1, 2), LAYOUTS["one-sized"].oracle, by_numpy(LAYOUTS["one-sized"].oracle)),
    },
)
