"""The framework suite, bound to NumPy and to torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import ingot.numpy
import ingot.torch
from frameworks import suite
from frameworks.suite import Binding, Layout


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


NUMPY = Binding(
    module=ingot.numpy,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit"},
    build=numpy_build,
    bytes_of=numpy_bytes,
    shape_of=lambda code, array: list(array.shape),
    dtype_of=numpy_dtype,
    layouts={
        "reversed": Layout((4, 3, 2), lambda array: array[::-1]),
        "broadcast": Layout((1, 2), lambda array: numpy.broadcast_to(array, (3, array.shape[1]))),
        "fortran": Layout((2, 3, 4), view=lambda array: array.copy(order="F")),
        "big-endian": Layout((2, 3, 4), view=lambda array: array.astype(array.dtype.newbyteorder(">"))),
    },
)


def torch_build(code: str, data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    storage = (*shape[:-1], shape[-1] // 2) if code == "F4" else shape
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(ingot.torch.DTYPES[code]).reshape(storage)


def torch_bytes(code: str, tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def torch_shape(code: str, tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape[:-1], tensor.shape[-1] * 2] if code == "F4" else list(tensor.shape)


TORCH = Binding(
    module=ingot.torch,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit"},
    build=torch_build,
    bytes_of=torch_bytes,
    shape_of=torch_shape,
    dtype_of=ingot.torch.DTYPES.__getitem__,
    layouts={
        "broadcast": Layout(
            (1, 2),
            lambda array: numpy.broadcast_to(array, (3, array.shape[1])),
            lambda tensor: tensor.expand(3, -1),
        ),
        "parameter": Layout((2, 4), view=lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    },
)
BINDINGS = {"numpy": NUMPY, "torch": TORCH}
CASES = [
    pytest.param(binding, code, layout, id=f"{name}-{code}-{title}")
    for name, binding in BINDINGS.items()
    for code in suite.BITS
    if code not in binding.refused
    for title, layout in suite.layouts_of(binding).items()
]
REFUSED = [
    pytest.param(binding, code, id=f"{name}-{code}")
    for name, binding in BINDINGS.items()
    for code in binding.refused
]


@pytest.mark.parametrize("format", suite.FORMATS)
@pytest.mark.parametrize(("binding", "code", "layout"), CASES)
def test_bytes_round_trip(binding: Binding, code: str, layout: Layout, format: str) -> None:
    suite.check_bytes(binding, suite.case(binding, code, layout), format)


@pytest.mark.parametrize("format", suite.FORMATS)
@pytest.mark.parametrize(("binding", "code", "layout"), CASES)
def test_files_round_trip(binding: Binding, code: str, layout: Layout, format: str, tmp_path: Path) -> None:
    suite.check_file(binding, suite.case(binding, code, layout), format, tmp_path)


@pytest.mark.parametrize(("binding", "code"), REFUSED)
def test_a_dtype_that_the_framework_lacks_blocks_only_its_tensor(
    binding: Binding, code: str, tmp_path: Path
) -> None:
    suite.check_refused(binding, code, tmp_path)


@pytest.mark.parametrize("binding", BINDINGS.values(), ids=BINDINGS)
def test_tables_are_complete(binding: Binding) -> None:
    tables = {"numpy": ingot.numpy.DTYPES | ingot.numpy.ML_DTYPES, "torch": ingot.torch.DTYPES}
    assert set(tables[binding.name]) | set(binding.refused) == set(suite.BITS)
