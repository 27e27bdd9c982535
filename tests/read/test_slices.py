"""Results of `get_slice(name)[index]`, with NumPy as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.numpy
from support.errors import raises

SHAPES = [(), (5,), (1,), (0,), (4, 5), (3, 0, 2), (4, 3, 6), (2, 1, 3, 4)]


def array_of(shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    return numpy.arange(numpy.prod(shape, dtype=int), dtype=numpy.int32).reshape(shape)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an array of every shape."""
    path = tmp_path_factory.mktemp("slices") / "slices.safetensors"
    ingot.numpy.save_file({str(shape): array_of(shape) for shape in SHAPES}, path)
    return path


numbers = st.integers(-7, 7)
bounds = st.none() | numbers | st.sampled_from([-(2**70), 2**70])
parts: st.SearchStrategy[Any] = st.one_of(
    numbers,
    numbers.map(numpy.int64),
    st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4) | st.just(2**70)),
    st.just(slice(None)),
    st.none(),
    st.just(...),
)
odd_parts: st.SearchStrategy[Any] = st.one_of(
    st.lists(numbers, max_size=4),
    st.booleans(),
    st.lists(st.booleans(), max_size=6),
    st.lists(numbers, max_size=3).map(lambda list: numpy.array(list, dtype=numpy.int64)),
    st.integers(-2, 2).map(numpy.array),
    st.just(numpy.bool_(True)),
)


def indices(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return parts | st.lists(parts, max_size=5).map(tuple)


def check(part: ingot._read.handle.TensorSlice, array: numpy.ndarray[Any, Any], index: Any) -> None:
    """Compare: both return the same values in the same shape, or both raise `IndexError`."""
    try:
        wanted = numpy.asarray(array[index])
    except IndexError:
        with raises(ingot.SliceError, tensor=str(array.shape)):
            part[index]
        return
    except DeprecationWarning:
        # NumPy 1 only warns of indices that NumPy 2 rejects, so it is no oracle for them.
        assert numpy.__version__.startswith("1.")
        return
    found = part[index]
    assert isinstance(found, numpy.ndarray)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert (found == wanted).all()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@given(shape=st.sampled_from(SHAPES), index=indices(parts))
def test_get_slice_reads_ints_and_slices_as_numpy(
    path: Path, backend: str, shape: tuple[int, ...], index: Any
) -> None:
    with ingot.safe_open(path, "np", backend=backend) as file:
        check(file.get_slice(str(shape)), array_of(shape), index)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@given(shape=st.sampled_from(SHAPES), index=indices(parts | odd_parts))
def test_get_slice_equals_numpy(path: Path, backend: str, shape: tuple[int, ...], index: Any) -> None:
    with ingot.safe_open(path, "np", backend=backend) as file:
        check(file.get_slice(str(shape)), array_of(shape), index)


@pytest.mark.parametrize("framework", ["np", "pt"])
@given(shape=st.sampled_from(SHAPES), index=indices(parts))
def test_get_slice_of_a_mapping_is_a_view(
    path: Path, framework: str, shape: tuple[int, ...], index: Any
) -> None:
    try:
        wanted = numpy.asarray(array_of(shape)[index])
    except IndexError:
        return
    with ingot.safe_open(path, framework, backend="mmap") as file:
        whole, part = file.get_tensor(str(shape)), file.get_slice(str(shape))[index]
    if framework == "pt":
        whole, part = whole.numpy(), part.numpy()
    numpy.testing.assert_array_equal(part, wanted)
    assert part.shape == wanted.shape
    longer = [axis for axis, size in enumerate(wanted.shape) if size > 1]
    if wanted.size:
        assert [part.strides[axis] for axis in longer] == [wanted.strides[axis] for axis in longer]
        assert numpy.shares_memory(whole, part)
        # Mapped tensors include writes, which do not reach the file.
        part[...] = -1
        wanted = array_of(shape)
        wanted[index] = -1
        numpy.testing.assert_array_equal(whole, wanted)
    numpy.testing.assert_array_equal(ingot.numpy.load_file(path)[str(shape)], array_of(shape))


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize(("backend", "index"), [("pread", numpy.s_[:, 1:3]), ("mmap", numpy.s_[[0, 2], 1:3])])
def test_get_slice_copies_lists_and_pread_in_c_order(
    path: Path, framework: str, backend: str, index: Any
) -> None:
    with ingot.safe_open(path, framework, backend=backend) as file:
        whole, part = file.get_tensor("(4, 5)"), file.get_slice("(4, 5)")[index]
    if framework == "pt":
        whole, part = whole.numpy(), part.numpy()
    assert part.flags.c_contiguous
    assert not numpy.shares_memory(whole, part)
    numpy.testing.assert_array_equal(part, array_of((4, 5))[index])


# No bounds beyond 64 bits: torch wraps those, with a warning.
torch_parts: st.SearchStrategy[Any] = st.one_of(
    numbers,
    st.builds(slice, st.none() | numbers, st.none() | numbers, st.none() | st.integers(1, 4)),
    st.none(),
    st.just(...),
    st.lists(numbers, max_size=4),
    st.booleans(),
)


@given(shape=st.sampled_from(SHAPES), index=indices(torch_parts))
def test_get_slice_of_torch_equals_torch(path: Path, shape: tuple[int, ...], index: Any) -> None:
    tensor = torch.from_numpy(array_of(shape))
    with ingot.safe_open(path, "pt") as file:
        part = file.get_slice(str(shape))
    try:
        wanted = tensor[index]
    except (IndexError, RuntimeError, TypeError):
        # torch refuses more than NumPy, such as `x[:]` of a scalar. Where torch returns a result, ingot
        # returns the same.
        return
    if isinstance(index, tuple) and sum(part is ... for part in index) > 1:
        # NumPy and ingot refuse this.
        return
    if not wanted.numel():
        # If the result is empty, torch does not check the indices in a list; NumPy and ingot do.
        return
    found = part[index]
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


places: st.SearchStrategy[Any] = st.one_of(
    numbers,
    numbers.map(numpy.int64),
    st.builds(range, numbers, numbers, st.integers(1, 3) | st.integers(-3, -1)),
)
listed: st.SearchStrategy[Any] = st.lists(places, max_size=4) | st.builds(range, numbers, numbers)


def written_out(part: Any) -> Any:
    """Return the same index for NumPy, for which a list of ranges has another meaning."""
    if isinstance(part, tuple):
        return tuple(map(written_out, part))
    if isinstance(part, range):
        return list(part)
    if isinstance(part, list):
        places = [place for one in part for place in (one if isinstance(one, range) else [int(one)])]
        return numpy.array(places, dtype=numpy.intp)
    return part


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@given(shape=st.sampled_from(SHAPES), index=indices(parts | listed))
def test_get_slice_takes_ranges(path: Path, backend: str, shape: tuple[int, ...], index: Any) -> None:
    array = array_of(shape)
    with ingot.safe_open(path, "np", backend=backend) as file:
        part = file.get_slice(str(shape))
        try:
            wanted = numpy.asarray(array[written_out(index)])
        except IndexError:
            with pytest.raises(ingot.SliceError):
                part[index]
            return
        numpy.testing.assert_array_equal(part[index], wanted, strict=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[Any, Any]]]:
    """Yield handles of mapped files whose tensor was written to, and the contents of the files."""
    folder = tmp_path_factory.mktemp("written")
    with ExitStack() as stack:
        found = {}
        for rows in (4, 3000):
            array = array_of((rows, 5, 40))
            ingot.numpy.save_file({"a": array}, folder / f"{rows}.safetensors")
            file = stack.enter_context(ingot.safe_open(folder / f"{rows}.safetensors", "np", backend="mmap"))
            file["a"][:] = -1
            found[rows] = file, array
        yield found


slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4))


@pytest.mark.parametrize("rows", [4, 3000])
@given(
    first=st.lists(numbers, max_size=1),
    some=st.lists(places, max_size=4),
    rest=st.lists(slices | st.none(), max_size=3),
)
def test_get_slice_with_a_list_returns_stored_values(
    written: dict[int, tuple[Any, Any]], rows: int, first: list[int], some: list[Any], rest: list[Any]
) -> None:
    file, array = written[rows]
    # A list of many rows.
    index = (*first, some * (rows // 4), *rest)
    try:
        wanted = numpy.asarray(array[written_out(index)])
    except IndexError:
        return
    numpy.testing.assert_array_equal(file.get_slice("a")[index], wanted, strict=True)


@pytest.mark.parametrize("rows", [4, 3000])
@given(index=indices(parts))
def test_get_slice_sees_written_memory(written: dict[int, tuple[Any, Any]], rows: int, index: Any) -> None:
    file, array = written[rows]
    try:
        wanted = numpy.full_like(array[index], -1)
    except IndexError:
        return
    numpy.testing.assert_array_equal(file.get_slice("a")[index], wanted, strict=True)


@pytest.mark.parametrize("index", [slice(None, None, -1), (..., slice(3, 0, -2))])
def test_get_slice_rejects_negative_steps(path: Path, index: Any) -> None:
    with ingot.safe_open(path, "np") as file, pytest.raises(ingot.SliceError, match="step") as caught:
        file.get_slice("(4, 5)")[index]
    assert caught.value.code == "negative-step"
    assert caught.value.path == str(path)


def test_get_slice_rejects_a_step_of_zero(path: Path) -> None:
    with ingot.safe_open(path, "np") as file, raises(ingot.SliceError, code="zero-step"):
        file.get_slice("(5,)")[::0]


@pytest.mark.parametrize("index", ["a", 1.0, {}, (slice("a", None),)], ids=str)
def test_get_slice_rejects_invalid_indices_with_a_builtin(path: Path, index: Any) -> None:
    with ingot.safe_open(path, "np") as file, pytest.raises((IndexError, TypeError)):
        file.get_slice("(5,)")[index]


def test_get_slice_treats_true_as_a_mask(path: Path) -> None:
    # Upstream reads it as 1.
    with ingot.safe_open(path, "np") as file:
        assert file.get_slice("(4, 5)")[True].shape == (1, 4, 5)
        assert file.get_slice("(4, 5)")[False].shape == (0, 4, 5)
    with ingot.safe_open(path, "pt") as file:
        assert file.get_slice("(4, 5)")[True].shape == (1, 4, 5)
        assert file.get_slice("(4, 5)")[torch.tensor(True)].shape == (1, 4, 5)


def test_get_slice_of_one_element_is_an_array(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        for index in [(1, 2), (numpy.array(1), numpy.array(2)), (..., 1, 2)]:
            element = file.get_slice("(4, 5)")[index]
            assert isinstance(element, numpy.ndarray)
            assert element.shape == ()
            assert element == 7


def test_slice_repr_has_name_shape_and_dtype(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        assert repr(file.get_slice("(4, 5)")) == "<slice of tensor `(4, 5)`: I32 [4, 5]>"


needs_f4 = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason=f"torch {torch.__version__} has no dtype for F4"
)


class TestF4:
    """If two elements share a byte, `get_shape` and indices count elements."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "f4.safetensors"
        data = bytes(range(12))
        ingot.serialize_file({"t": {"dtype": "F4", "shape": [3, 8], "data": data}}, path)
        return path

    @pytest.mark.parametrize("framework", ["np", pytest.param("pt", marks=needs_f4)])
    def test_get_slice_of_small_floats_on_byte_boundaries(self, path: Path, framework: str) -> None:
        # Upstream raises for torch here.
        with ingot.safe_open(path, framework) as file:
            part = file.get_slice("t")
            for index in [(slice(1, 2),), (..., slice(2, 6)), (-1, slice(4, None)), (slice(None, None, 2),)]:
                found, whole = part[index], numpy.arange(12).reshape(3, 4)
                *rows, last = index
                if isinstance(last, slice) and last.step is None and len(index) > 1:
                    halves = slice(*(end and end // 2 for end in (last.start, last.stop)))
                    wanted = whole[(*rows, halves)]
                else:
                    wanted = whole[index]
                if framework == "pt":
                    assert found.view(torch.uint8).tolist() == wanted.tolist()
                else:
                    assert found.shape == (*wanted.shape[:-1], wanted.shape[-1] * 2)
                    nibbles = found.view(numpy.uint8)
                    assert (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).tolist() == wanted.tolist()

    @pytest.mark.parametrize("framework", ["np", pytest.param("pt", marks=needs_f4)])
    def test_get_slice_rejects_small_floats_inside_a_byte(self, path: Path, framework: str) -> None:
        with ingot.safe_open(path, framework) as file, raises(ingot.SliceError, code="partial-byte"):
            file.get_slice("t")[:, 1:3]

    @needs_f4
    def test_get_slice_of_torch_rejects_packed_elements(self, path: Path) -> None:
        with ingot.safe_open(path, "pt") as file, pytest.raises(ingot.SliceError, match="`t`"):
            file.get_slice("t")[[0, 1], [0, 1]]
