"""Tests of every framework's module, written once.

A `Binding` has the functions that make a tensor of a framework from bytes, and return its bytes. The checks
below use nothing else of the framework. The expected contents of each layout come from NumPy.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import ingot
from support.dtypes import BITS
from support.errors import raises

# The dtypes that .bt files support.
BINTENSORS = set(BITS) - {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}
FORMATS = ("safetensors", "bintensors")
BACKENDS = ("mmap", "pread")


@dataclass(frozen=True)
class Layout:
    """A shape, a function that makes a view of an array of that shape, and its form for the framework."""

    shape: tuple[int, ...]
    oracle: Callable[[Any], Any] = lambda array: array
    view: Callable[[Any], Any] | None = None
    """`oracle` if None."""


# Layouts of tensors in memory, by name.
LAYOUTS = {
    "empty": Layout((3, 0, 2)),
    "scalar": Layout(()),
    "vector": Layout((6,)),
    "cube": Layout((2, 3, 4)),
    "transposed": Layout((4, 2, 6), lambda array: array.swapaxes(0, 1)),
    "strided": Layout((4, 4), lambda array: array[::2]),
    "one-sized": Layout((1, 4, 1, 2), lambda array: array[:, 1:3]),
}


@dataclass(frozen=True)
class Binding:
    """One framework: its module in ingot, and the functions that this suite calls."""

    module: ModuleType
    """Its module in ingot."""
    refused: Mapping[str, str]
    """The dtypes that it cannot hold, each with a word from the reason."""
    build: Callable[[str, bytes, tuple[int, ...]], Any]
    """A C-contiguous tensor of that dtype code, bytes and header shape."""
    bytes_of: Callable[[str, Any], bytes]
    """The bytes of a tensor in C order, as the file holds them."""
    shape_of: Callable[[str, Any], list[int]]
    """The shape that the header of that tensor has."""
    dtype_of: Callable[[str], Any]
    """The dtype of a tensor of that code."""
    table: Collection[str]
    """The codes of its dtype table in ingot."""
    layouts: Mapping[str, Layout]
    """What only this framework has."""

    @property
    def name(self) -> str:
        return self.module.__name__.removeprefix("ingot.")


def lacking(young: Mapping[str, str], has: Callable[[str], bool]) -> dict[str, str]:
    """Return the dtypes that the installed version of a framework does not have yet.

    `young` has the framework's name of each recent dtype, by its code.
    """
    return {code: f"no dtype for {code}" for code, name in young.items() if not has(name)}


@dataclass(frozen=True)
class Case:
    """A tensor, and its expected contents in a file."""

    tensor: Any
    code: str
    shape: list[int]
    data: bytes


def pattern(code: str, shape: tuple[int, ...]) -> bytes:
    """Return bytes for a tensor: different elements as far as the dtype permits, and no NaN."""
    nbytes = math.prod(shape) * BITS[code] // 8
    values = numpy.arange(nbytes, dtype=numpy.uint32)
    return (values % 2 if code == "BOOL" else values % 61 + 3).astype(numpy.uint8).tobytes()


def elements(code: str, data: bytes, shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    """Return the bytes as an array of opaque elements. For F4 each has the two elements of a byte.

    The suite never changes the last dimension of F4, so that both elements of a byte stay together.
    """
    stored = (*shape[:-1], shape[-1] // 2) if code == "F4" else shape
    return numpy.frombuffer(data, f"V{max(BITS[code] // 8, 1)}").reshape(stored)


def layouts_of(binding: Binding) -> dict[str, Layout]:
    return LAYOUTS | dict(binding.layouts)


def case(binding: Binding, code: str, layout: Layout) -> Case:
    """Return a tensor with that layout. NumPy computes the expected bytes, from elements of the same size."""
    shape = (2,) if code == "F4" and layout.shape == () else layout.shape
    data = pattern(code, shape)
    tensor = (layout.view or layout.oracle)(binding.build(code, data, shape))
    array = layout.oracle(elements(code, data, shape))
    return Case(tensor, code, binding.shape_of(code, tensor), numpy.ascontiguousarray(array).tobytes())


def stored(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        name: (entry["dtype"], entry["shape"], bytes(entry["data"]))
        for name, entry in ingot.deserialize(data)
    }


def check_same(binding: Binding, loaded: Any, expected: Case) -> None:
    assert binding.shape_of(expected.code, loaded) == expected.shape
    assert loaded.dtype == binding.dtype_of(expected.code)
    assert binding.bytes_of(expected.code, loaded) == expected.data


def check_save(binding: Binding, expected: Case, format: str) -> bytes:
    """`save` returns the bytes of the logical tensor, or rejects a dtype that the format lacks."""
    if format == "bintensors" and expected.code not in BINTENSORS:
        with raises(ingot.SaveError, code="unsupported-dtype") as caught:
            binding.module.save({"t": expected.tensor}, format=format)
        assert "`t`" in str(caught.value)
        assert expected.code in str(caught.value)
        return b""
    data: bytes = binding.module.save({"t": expected.tensor}, {"key": "value"}, format=format)
    assert stored(data) == {"t": (expected.code, expected.shape, expected.data)}
    return data


def check_round_trip(binding: Binding, expected: Case, format: str, folder: Path) -> None:
    """`load` and `load_file` read what `save` and `save_file` wrote, by every backend and from any buffer."""
    data = check_save(binding, expected, format)
    if not data:
        return
    for source in (data, bytearray(data), memoryview(data)):
        loaded = binding.module.load(source)
        assert list(loaded) == ["t"]
        check_same(binding, loaded["t"], expected)
    path = folder / ("model.bt" if format == "bintensors" else "model.safetensors")
    binding.module.save_file({"t": expected.tensor}, path, {"key": "value"})
    assert path.read_bytes() == data
    memory = io.BytesIO()
    binding.module.save_file({"t": expected.tensor}, memory, {"key": "value"}, format=format)
    assert memory.getvalue() == data
    for backend in BACKENDS:
        check_same(binding, binding.module.load_file(path, backend=backend)["t"], expected)
        with ingot.safe_open(path, binding.name, backend=backend) as file:
            assert file.backend == backend
            check_same(binding, file.get_tensor("t"), expected)
            check_slices(binding, file.get_slice("t"), expected)


def check_slices(binding: Binding, part: Any, expected: Case) -> None:
    """`get_slice` returns the slice of NumPy. test_slices covers all indices."""
    assert part.get_shape() == expected.shape
    assert part.get_dtype() == expected.code
    indices: list[Any] = [..., ()]
    if len(expected.shape) > (expected.code == "F4"):
        # Only the first dimension is indexed: it is not packed for any dtype.
        indices += [
            slice(None),
            slice(1, None),
            slice(None, None, 2),
            slice(0, 0),
            slice(-2, 100),
            (0,),
            -1,
            [],
        ]
    if len(expected.shape) > 2:
        indices += [(slice(None), 0), (..., slice(1), slice(None)), None]
    whole = elements(expected.code, expected.data, tuple(expected.shape))
    for index in indices:
        try:
            wanted = whole[index]
        except IndexError:
            with pytest.raises(IndexError):
                part[index]
            continue
        found = part[index]
        shape = [*wanted.shape[:-1], wanted.shape[-1] * 2] if expected.code == "F4" else list(wanted.shape)
        assert binding.shape_of(expected.code, found) == shape, index
        assert binding.bytes_of(expected.code, found) == wanted.tobytes(), index


def check_refused(binding: Binding, code: str, folder: Path) -> None:
    """A tensor whose dtype the framework lacks is rejected, and all others are loaded."""
    path = folder / "refused.safetensors"
    tensors = {
        "good": {"dtype": "F32", "shape": [2], "data": pattern("F32", (2,))},
        "odd": {"dtype": code, "shape": [8], "data": pattern(code, (8,))},
    }
    ingot.serialize_file(tensors, path)
    with raises(ingot.DtypeError, tensor="odd", code="dtype-not-in-framework") as caught:
        binding.module.load_file(path)
    assert str(path) in str(caught.value)
    assert binding.refused[code] in str(caught.value)
    with ingot.safe_open(path, binding.name) as file:
        assert file.info("odd").dtype == code
        assert binding.bytes_of("F32", file["good"]) == tensors["good"]["data"]
        for read in (file.get_tensor, file.get_slice("odd").__getitem__):
            with pytest.raises(ingot.DtypeError, match="odd"):
                read("odd" if read == file.get_tensor else ...)


def check_cell(binding: Binding, code: str, package: str, folder: Path) -> None:
    """A dtype keeps its bits in every way to save and load, or is rejected with a reason in every way."""
    shape = (16, 16)
    data = every_byte(code, shape)
    path = folder / "cell.safetensors"
    ingot.serialize_file({"t": {"dtype": code, "shape": shape, "data": data}}, path)
    file = path.read_bytes()
    if code in binding.refused:
        for read in reads(binding, file, path).values():
            with pytest.raises(ingot.DtypeError, match=rf"tensor `t`: {package}\b.* no dtype for {code}\b"):
                read()
        return
    expected = Case(binding.build(code, data, shape), code, list(shape), data)
    assert binding.module.save({"t": expected.tensor}) == file
    for way, read in reads(binding, file, path).items():
        loaded = read()
        check_same(binding, loaded, expected)
        again = folder / f"{way}.safetensors"
        binding.module.save_file({"t": loaded}, again)
        assert again.read_bytes() == file, way


def every_byte(code: str, shape: tuple[int, ...]) -> bytes:
    """Return bytes for a tensor: all 256 values if it is long enough, so with NaNs of every kind."""
    nbytes = math.prod(shape) * BITS[code] // 8
    values = numpy.arange(nbytes, dtype=numpy.uint32) * 37
    return (values % 2 if code == "BOOL" else values).astype(numpy.uint8).tobytes()


def reads(binding: Binding, file: bytes, path: Path) -> dict[str, Callable[[], Any]]:
    """Return every way to read the tensor `t`."""
    ways: dict[str, Callable[[], Any]] = {"load": lambda: binding.module.load(file)["t"]}
    for backend in BACKENDS:
        ways[f"load_file-{backend}"] = partial(load_one, binding, path, backend)
        for method in ("get_tensor", "get_slice", "get_tensors"):
            ways[f"{method}-{backend}"] = partial(open_one, binding, path, backend, method)
    return ways


def load_one(binding: Binding, path: Path, backend: str) -> Any:
    return binding.module.load_file(path, backend=backend)["t"]


def open_one(binding: Binding, path: Path, backend: str, method: str) -> Any:
    with ingot.safe_open(path, binding.name, backend=backend) as file:
        if method == "get_tensors":
            return file.get_tensors(["t"])["t"]
        found = getattr(file, method)("t")
        return found[:] if method == "get_slice" else found
