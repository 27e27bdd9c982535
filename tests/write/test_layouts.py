"""Whatever lies in memory however it lies, a file holds the logical array, in C order and little-endian."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch

Array = numpy.ndarray[Any, Any]

NUMPY_DTYPES = [
    *("?", "u1", "i1", "<i2", ">i2", "<u2", ">u2", "<f2", ">f2", "<i4", ">i4", "<u4", ">u4", "<f4", ">f4"),
    *("<i8", ">i8", "<u8", ">u8", "<f8", ">f8", "<c8", ">c8"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
]
NUMPY_STEPS = ["transpose", "cut", "fortran", "new", "broadcast", "window"]
TORCH_STEPS = ["transpose", "cut", "new", "expand", "unfold", "conj", "imag"]
sizes = st.integers(0, 4)
shapes = st.lists(sizes, max_size=4).map(tuple)


def filled(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of `dtype` whose elements differ as far as that has room, none of them NaN."""
    count = int(numpy.prod(shape, dtype=int))
    return (numpy.arange(count) % 97 + 1).reshape(shape).astype(numpy.dtype(dtype))


@st.composite
def numpy_layouts(draw: st.DrawFn) -> Array:
    """An array that was transposed, cut, reversed, broadcast and so on, in any order."""
    array = filled(draw(shapes), draw(st.sampled_from(NUMPY_DTYPES)))
    for step in draw(st.lists(st.sampled_from(NUMPY_STEPS))):
        if step == "transpose":
            array = array.transpose(draw(st.permutations(range(array.ndim))))
        elif step == "cut" and array.ndim:
            steps = st.integers(-3, 3).filter(bool)
            cuts = st.builds(slice, st.none() | st.integers(-4, 4), st.none() | st.integers(-4, 4), steps)
            array = array[tuple(draw(st.lists(cuts, max_size=array.ndim)))]
        elif step == "fortran":
            array = array.copy(order="F")
        elif step == "new" and array.ndim < 6:
            array = array[draw(st.sampled_from([(None,), (..., None)]))]
        elif step == "broadcast" and array.ndim < 6:
            array = numpy.broadcast_to(array, (draw(sizes), *array.shape))
        elif step == "window" and array.ndim and array.shape[0] >= 2 and array.dtype.isbuiltin < 2:
            # NumPy cannot make windows over dtypes that are not its own.
            array = numpy.lib.stride_tricks.sliding_window_view(array, 2, axis=0)
    return array


@given(arrays=st.lists(numpy_layouts(), min_size=1, max_size=3))
def test_any_numpy_array_comes_back(arrays: list[Array]) -> None:
    named = {str(number): array for number, array in enumerate(arrays)}
    data = ingot.numpy.save(named)
    for name, entry in ingot.deserialize(data):
        array = named[name]
        packed = array.astype(array.dtype.newbyteorder("<"), order="C")
        assert entry["shape"] == list(array.shape)
        assert entry["data"] == packed.tobytes()
    for name, loaded in ingot.numpy.load(data).items():
        assert loaded.dtype == named[name].dtype.newbyteorder("<")
        assert loaded.shape == named[name].shape
        assert loaded.flags.c_contiguous
        assert loaded.flags.writeable
        assert (loaded == named[name]).all()


@given(array=numpy_layouts())
def test_saving_does_not_change_the_array(array: Array) -> None:
    before = array.tobytes()
    ingot.numpy.save({"t": array})
    assert array.tobytes() == before


def test_a_numpy_scalar_is_an_array_without_dimensions() -> None:
    # Upstream fails here: a scalar has no `ctypes`.
    scalars = {"f": numpy.float32(1.5), "b": numpy.bool_(True), "m": ml_dtypes.bfloat16(2)}
    loaded = ingot.numpy.load(ingot.numpy.save(scalars))
    assert all(isinstance(array, numpy.ndarray) and array.shape == () for array in loaded.values())
    assert {name: array[()] for name, array in loaded.items()} == scalars


def test_subclasses_of_ndarray_are_arrays() -> None:
    class Table(numpy.ndarray[Any, Any]):
        pass

    table = numpy.array([[1, 2], [3, 4]]).T.view(Table)
    loaded = ingot.numpy.load(ingot.numpy.save({"t": table}))["t"]
    assert type(loaded) is numpy.ndarray
    assert loaded.tolist() == [[1, 3], [2, 4]]


TORCH_DTYPES = [ingot.torch.DTYPES[code] for code in ingot.torch.DTYPES if code != "F4"]


@st.composite
def torch_layouts(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(shapes)
    count = int(numpy.prod(shape, dtype=int))
    tensor = (torch.arange(count) % 97).reshape(shape).to(draw(st.sampled_from(TORCH_DTYPES)))
    for step in draw(st.lists(st.sampled_from(TORCH_STEPS))):
        if step == "transpose":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        elif step == "cut" and tensor.ndim:
            cuts = st.builds(slice, st.integers(0, 3), st.none(), st.integers(1, 3))
            tensor = tensor[tuple(draw(st.lists(cuts, max_size=tensor.ndim)))]
        elif step == "new" and tensor.ndim < 6:
            tensor = tensor[draw(st.sampled_from([(None,), (..., None)]))]
        elif step == "expand" and tensor.ndim < 6:
            tensor = tensor.expand(draw(sizes), *tensor.shape)
        elif step == "unfold" and tensor.ndim and tensor.shape[0] >= 2:
            tensor = tensor.unfold(0, 2, 1)
        elif step == "conj":
            tensor = tensor.conj()
        elif step == "imag" and tensor.is_complex():
            # Of a conjugate this is a lazily negated view.
            tensor = tensor.imag
    return tensor


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of the tensor's values, got element by element."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    for number, element in enumerate(tensor.resolve_conj().resolve_neg().reshape(-1)):
        flat[number] = element
    return bytes(flat.view(torch.uint8).numpy())


@given(tensor=torch_layouts())
def test_any_torch_tensor_comes_back(tensor: torch.Tensor) -> None:
    data = ingot.torch.save({"t": tensor})
    ((_, entry),) = ingot.deserialize(data)
    assert entry["shape"] == list(tensor.shape)
    assert entry["data"] == plain_bytes(tensor)
    loaded = ingot.torch.load(data)["t"]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert loaded.is_contiguous()
    assert plain_bytes(loaded) == plain_bytes(tensor)
