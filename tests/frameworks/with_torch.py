"""Torch, bound to the framework suite."""

from __future__ import annotations

from functools import partial

import numpy
import torch

import ingot.torch

from .suite import Binding, Layout, lacking


def torch_build(code: str, data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    storage = (*shape[:-1], shape[-1] // 2) if code == "F4" else shape
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(ingot.torch.DTYPES[code]).reshape(storage)


def torch_bytes(code: str, tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def torch_shape(code: str, tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape[:-1], tensor.shape[-1] * 2] if code == "F4" else list(tensor.shape)


YOUNG = {"F4": "float4_e2m1fn_x2", "F8_E8M0": "float8_e8m0fnu"}

BINDING = Binding(
    module=ingot.torch,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit", **lacking(YOUNG, partial(hasattr, torch))},
    build=torch_build,
    bytes_of=torch_bytes,
    shape_of=torch_shape,
    dtype_of=ingot.torch.DTYPES.__getitem__,
    table=ingot.torch.DTYPES,
    layouts={
        "broadcast": Layout(
            (1, 2),
            lambda array: numpy.broadcast_to(array, (3, array.shape[1])),
            lambda tensor: tensor.expand(3, -1),
        ),
        "parameter": Layout((2, 4), view=lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    },
)
