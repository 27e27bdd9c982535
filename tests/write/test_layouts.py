"""A file has the elements in C order and little-endian, for every layout in memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ingot
import ingot.numpy
import ingot.torch
from ingot._write.save import boxes
from support.errors import raises

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
    """Return an array of `dtype` with different elements as far as the dtype permits, and without NaN."""
    count = int(numpy.prod(shape, dtype=int))
    return (numpy.arange(count) % 97 + 1).reshape(shape).astype(numpy.dtype(dtype))


@st.composite
def numpy_layouts(draw: st.DrawFn) -> Array:
    """Draw an array that was transposed, sliced, reversed, broadcast and so on, in random order."""
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
            # NumPy makes sliding windows of its own dtypes only.
            array = numpy.lib.stride_tricks.sliding_window_view(array, 2, axis=0)
    return array


@given(arrays=st.lists(numpy_layouts(), min_size=1, max_size=3))
def test_save_file_stores_any_numpy_array(arrays: list[Array]) -> None:
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
def test_save_file_leaves_the_array_unchanged(array: Array) -> None:
    before = array.tobytes()
    ingot.numpy.save({"t": array})
    assert array.tobytes() == before


def test_save_file_stores_a_numpy_scalar() -> None:
    # Upstream fails here: a scalar has no `ctypes`.
    scalars = {"f": numpy.float32(1.5), "b": numpy.bool_(True), "m": ml_dtypes.bfloat16(2)}
    loaded = ingot.numpy.load(ingot.numpy.save(scalars))
    assert all(isinstance(array, numpy.ndarray) and array.shape == () for array in loaded.values())
    assert {name: array[()] for name, array in loaded.items()} == scalars


def test_save_file_stores_ndarray_subclasses() -> None:
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
            # For a conjugate this is a lazily negated view.
            tensor = tensor.imag
    return tensor


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the tensor's values, collected element by element."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    for number, element in enumerate(tensor.resolve_conj().resolve_neg().reshape(-1)):
        flat[number] = element
    return bytes(flat.view(torch.uint8).numpy())


@given(tensor=torch_layouts())
def test_save_file_stores_any_torch_tensor(tensor: torch.Tensor) -> None:
    data = ingot.torch.save({"t": tensor})
    ((_, entry),) = ingot.deserialize(data)
    assert entry["shape"] == list(tensor.shape)
    assert entry["data"] == plain_bytes(tensor)
    loaded = ingot.torch.load(data)["t"]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert loaded.is_contiguous()
    assert plain_bytes(loaded) == plain_bytes(tensor)


SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_the_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = numpy.arange(prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(begin, array.size))
    found = boxes(shape, begin, end)
    assert len(found) <= 2
    assert sum(prod(box.sizes) for box in found) <= 3 * (end - begin) or not shape
    parts = [array[box.slices].reshape(-1)[box.within] for box in found]
    assert numpy.concatenate(parts).tolist() == list(range(begin, end))
    for box in found:
        assert array[box.slices].shape == box.sizes


@pytest.mark.parametrize("shape", [(100, 7), (7, 100), (3, 4, 50), (97, 61)])
def test_boxes_have_a_size_independent_of_their_start(shape: tuple[int, ...]) -> None:
    count = 60
    found = [boxes(shape, begin, begin + count) for begin in range(0, prod(shape) - count, 17)]
    assert len({each[0].sizes for each in found if len(each) == 1}) == 1


CUBE = torch.arange(24.0).reshape(1, 2, 3, 4)
COMPLEX = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))

STRIDED: dict[str, torch.Tensor] = {
    "transposed": CUBE.transpose(1, 3),
    "channels last": CUBE.to(memory_format=torch.channels_last),
    "channels last 3d": CUBE.reshape(1, 2, 2, 3, 2).to(memory_format=torch.channels_last_3d),
    "every other": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(3),
    "overlapping windows": torch.arange(6.0).unfold(0, 3, 1),
    "transposed halves": torch.arange(6.0).reshape(2, 3).t().bfloat16(),
    "transposed bytes": torch.arange(6, dtype=torch.uint8).reshape(2, 3).t().view(torch.float8_e4m3fn),
}
PLAIN: dict[str, torch.Tensor] = {
    "conjugate": COMPLEX.conj(),
    "negative": torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": torch.ones(2, dtype=torch.complex64).conj().imag[:1],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "requires grad": torch.ones(2, requires_grad=True) * 2,
    "row": torch.ones(100, 2)[4:5],
}
# From torch 2.5 on.
if hasattr(torch.nn, "Buffer"):
    PLAIN["buffer"] = torch.nn.Buffer(torch.ones(2))


@pytest.mark.parametrize("name", [*STRIDED, *PLAIN])
def test_save_file_stores_logical_values(name: str, tmp_path: Path) -> None:
    tensor = (STRIDED | PLAIN)[name]
    ingot.torch.save_file({"t": tensor}, tmp_path / "t")
    for loaded in (ingot.torch.load_file(tmp_path / "t"), ingot.torch.load(ingot.torch.save({"t": tensor}))):
        assert loaded["t"].dtype == tensor.dtype
        wanted = tensor.detach().resolve_conj().resolve_neg()
        assert loaded["t"].tolist() == wanted.float().tolist() if wanted.itemsize < 2 else wanted.tolist()


@pytest.mark.parametrize("name", list(STRIDED))
def test_contiguous_error_rejects_other_layouts(name: str, tmp_path: Path) -> None:
    with raises(ingot.SaveError, r"non contiguous tensor: `t`.*`\.contiguous\(\)`", code="not-contiguous"):
        ingot.torch.save({"t": STRIDED[name]}, contiguous="error")
    with pytest.raises(ValueError, match="non contiguous"):
        ingot.torch.save_file({"t": STRIDED[name]}, tmp_path / "t", contiguous="error")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", list(PLAIN))
def test_contiguous_error_accepts_c_order(name: str) -> None:
    # Some of these tensors are not contiguous, such as a view of every other element.
    if PLAIN[name].is_contiguous():
        assert ingot.torch.save({"t": PLAIN[name]}, contiguous="error")


def test_contiguous_lists_choices_for_an_unknown_one() -> None:
    with pytest.raises(ingot.OptionError, match="contiguous 'auto' is unknown: expected one of copy, error"):
        ingot.torch.save({}, contiguous="auto")  # type: ignore[arg-type]


class Pair(torch.Tensor):
    """A tensor made of two tensors, as in torchao."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)  # type: ignore[attr-defined]
        made.left, made.right = left, right
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return "Pair"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].left, args[0].right)
        raise NotImplementedError(func)


class Labelled(torch.Tensor):
    """A subclass with values like any other tensor's."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def distributed() -> torch.Tensor:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Replicate, distribute_tensor
    except ImportError:
        # The place of these functions in torch 2.4.
        from torch.distributed._tensor import Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor: torch.Tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    finally:
        # A process has one default group, and other tests make their own.
        distributed.destroy_process_group()
    return tensor


def of_torchao() -> torch.Tensor:
    kind = type("AffineQuantizedTensor", (Pair,), {"__module__": "torchao.dtypes.affine_quantized_tensor"})
    tensor: torch.Tensor = kind(torch.ones(1), torch.ones(1))
    return tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), ["meta tensor", "no values"]),
        (fake, ["FakeTensor", "no values"]),
        (lambda: torch.eye(2).to_sparse(), ["sparse_coo", "`.to_dense()`"]),
        (lambda: torch.eye(2).to_sparse_csr(), ["sparse_csr", "`.to_dense()`"]),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), ["quantised", "int_repr"]),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), ["nested", "unbind"]),
        (torch.nn.UninitializedParameter, ["UninitializedParameter", "run the module once"]),
        (lambda: Pair(torch.ones(1), torch.ones(1)), ["Pair", "`.left`, `.right`"]),
        (lambda: torch.nn.Parameter(Pair(torch.ones(1), torch.ones(1))), ["Pair", "`.left`, `.right`"]),
        (of_torchao, ["AffineQuantizedTensor", "torchao", "flatten_tensor_state_dict", "`.dequantize()`"]),
        (distributed, ["DTensor", "`.full_tensor()`", "`.to_local()`"]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns of features that it will drop.
@pytest.mark.parametrize("shared", ["error", "copy", "alias"])
@pytest.mark.parametrize("contiguous", ["error", "copy"])
def test_save_file_names_a_tensor_without_bytes(
    make: Callable[[], torch.Tensor], words: list[str], shared: Any, contiguous: Any, tmp_path: Path
) -> None:
    tensors = {"plain": torch.ones(1), "t": make()}
    with raises(ingot.SaveError, tensor="t") as caught:
        ingot.torch.save_file(tensors, tmp_path / "t", shared=shared, contiguous=contiguous)
    assert all(word in str(caught.value) for word in ["`t`", *words]), str(caught.value)
    assert not (tmp_path / "t").exists()


def test_save_file_stores_subclasses_with_values() -> None:
    tensor = torch.arange(3.0).as_subclass(Labelled)
    assert ingot.torch.load(ingot.torch.save({"t": tensor}))["t"].tolist() == [0, 1, 2]


def test_load_file_to_meta_reads_no_data(tmp_path: Path) -> None:
    path = tmp_path / "t"
    ingot.torch.save_file({"t": torch.ones(3)}, path)
    loaded = ingot.torch.load_file(path, "meta")["t"]
    assert (loaded.device.type, loaded.shape) == ("meta", (3,))


class Watch(TorchDispatchMode):
    """Records the size in bytes of each copy that torch makes in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "clone" in str(func):
            self.copied.append(result.nbytes)
        return result


def test_save_file_copies_no_contiguous_tensor(tmp_path: Path) -> None:
    tensors = {"packed": torch.ones(1000), "turned": torch.ones(10, 20).t()}
    with Watch() as watch:
        ingot.torch.save_file(tensors, tmp_path / "t")
        assert watch.copied == []
        tensors["turned"].clone()
    assert watch.copied == [800], "the watch sees copies"
