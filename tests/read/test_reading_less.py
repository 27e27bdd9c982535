"""Reading some tensors, parts of them, in another dtype, into memory that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy

BACKENDS = ("mmap", "pread")
ARRAYS = {
    "a.weight": np.arange(60, dtype=np.float32).reshape(6, 10) / 7,
    "a.bias": np.arange(6, dtype=np.float64),
    "b.ids": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    "b.half": np.arange(12, dtype=np.float16).reshape(3, 4),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("less") / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    return path


def test_load_file_keys_and_drop_select_tensors(file: Path, backend: str) -> None:
    load = ingot.numpy.load_file
    assert list(load(file, backend=backend, keys=["scalar", "a.bias"])) == ["scalar", "a.bias"]
    assert set(load(file, backend=backend, keys="a.*")) == {"a.weight", "a.bias"}
    assert set(load(file, backend=backend, keys=ingot.glob("b.*", "s*"))) == {"b.ids", "b.half", "scalar"}
    found = load(file, backend=backend, keys=lambda info: info.dtype == "F32" and info.nbytes > 4)
    assert list(found) == ["a.weight"]
    both = load(file, backend=backend, keys=["b.ids", "a.bias", "a.weight"], drop="*.weight")
    assert list(both) == ["b.ids", "a.bias"]
    np.testing.assert_array_equal(both["a.bias"], ARRAYS["a.bias"])
    assert load(file, backend=backend, keys=[]) == {}


@pytest.mark.parametrize("option", ["keys", "slices", "out"])
def test_an_unknown_name_is_refused_with_the_nearest(file: Path, option: str) -> None:
    given = {"keys": ["weight"], "slices": {"weight": 0}, "out": {"weight": np.zeros(1)}}[option]
    with pytest.raises(ingot.TensorNotFoundError, match=r"did you mean `a\.weight`"):
        ingot.numpy.load_file(file, **{option: given})


@pytest.mark.parametrize("option", ["slices", "out"])
def test_a_tensor_that_the_other_options_leave_out_is_refused(file: Path, option: str) -> None:
    with pytest.raises(ingot.OptionError, match=f"{option} has tensor `scalar`") as caught:
        ingot.numpy.load_file(file, keys="a.*", **{option: {"scalar": ...}})
    assert (caught.value.code, caught.value.tensor) == ("not-selected", "scalar")


PARTS = st.one_of(
    st.integers(-3, 2),
    st.slices(8).filter(lambda part: part.step is None or part.step > 0),
    st.just(...),
    st.none(),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.lists(PARTS, max_size=4).map(tuple), dtype=st.sampled_from([None, "float16", "float64"]))
def test_slices_are_those_of_numpy(
    file: Path, backend: str, index: tuple[object, ...], dtype: str | None
) -> None:
    for name in ("a.weight", "b.ids", "b.half"):
        try:
            expected = ARRAYS[name][index]
        except IndexError:
            with pytest.raises(ingot.SliceError):
                ingot.numpy.load_file(file, backend=backend, keys=[name], slices={name: index})
            continue
        if dtype is not None and expected.dtype.kind == "f":
            expected = expected.astype(dtype)
        found = ingot.numpy.load_file(file, backend=backend, keys=[name], slices={name: index}, dtype=dtype)[
            name
        ]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A file with one array whose columns are long enough to be copied row by row."""
    path = tmp_path_factory.mktemp("columns") / "table.safetensors"
    array = np.random.default_rng(0).integers(-999, 999, (20, 30, 700)).astype(np.float32)
    ingot.numpy.save_file({"table": array}, path)
    return path, array


ALONG = st.builds(
    slice, st.integers(0, 9), st.none() | st.integers(10, 700), st.sampled_from([None, 1, 2, 7])
)
PICKED = st.lists(st.integers(-20, 19), min_size=1, max_size=40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    index=st.tuples(ALONG | PICKED, ALONG, ALONG),
    dtype=st.sampled_from(["float32", "float16", "float64"]),
    is_turned=st.booleans(),
)
def test_load_file_columns_equal_numpys(
    table: tuple[Path, np.ndarray], backend: str, index: tuple[object, ...], dtype: str, is_turned: bool
) -> None:
    path, array = table
    expected = array[index].astype(dtype)
    out = np.full(expected.shape, -1, dtype)
    out = np.full(expected.shape[::-1], -1, dtype).T if is_turned else out
    ingot.numpy.load_file(path, backend=backend, slices={"table": index}, dtype=dtype, out={"table": out})
    np.testing.assert_array_equal(out, expected)
    fresh = ingot.numpy.load_file(path, backend=backend, slices={"table": index}, dtype=dtype)
    np.testing.assert_array_equal(fresh["table"], expected)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A file whose columns are copied by more than one task."""
    path = tmp_path / "long.safetensors"
    ingot.numpy.save_file({"table": np.zeros((16 << 10, 1024), np.int16)}, path)
    return path


CANNOT_SHORTEN = pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be shortened")


@CANNOT_SHORTEN
def test_get_slice_rejects_columns_of_a_shortened_file(long: Path, backend: str) -> None:
    with ingot.safe_open(long, "np", backend=backend) as file:
        part = file.get_slice("table")
        os.truncate(long, 4096)
        with pytest.raises(ingot.StorageError, match=r"33554520.*4096") as caught:
            part[:, [0, *range(2, 512)]]
    assert caught.value.code == "changed"


@CANNOT_SHORTEN
def test_load_file_rejects_a_file_that_is_shortened_between_columns(long: Path, backend: str) -> None:
    def shorten(done: int, total: int) -> None:
        if 0 < done < total:
            os.truncate(long, 4096)

    out = {"table": np.zeros((16 << 10, 512), np.int16)}
    slices = {"table": (slice(None), slice(512))}
    with pytest.raises(ingot.StorageError, match=r"33554520.*4096") as caught:
        ingot.numpy.load_file(long, backend=backend, slices=slices, out=out, threads=1, progress=shorten)
    assert caught.value.code == "changed"


def test_an_index_for_the_framework_does_not_go_with_a_place(file: Path) -> None:
    out = {"a.weight": np.zeros(6, np.float32)}
    with pytest.raises(ingot.SliceError, match="only frameworks know, which goes without a place in out"):
        ingot.numpy.load_file(file, slices={"a.weight": ARRAYS["a.weight"] > 0}, out=out)


def test_only_floats_are_converted(file: Path, backend: str) -> None:
    found = ingot.numpy.load_file(file, backend=backend, dtype="F16")
    for name, array in ARRAYS.items():
        expected = array.astype(np.float16) if array.dtype.kind == "f" else array
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


def test_out_is_filled_where_it_lies(file: Path, backend: str) -> None:
    wide = np.full((6, 40), -1, np.float32)
    out = {
        "a.weight": wide[:, 1::4],
        "a.bias": np.zeros(6)[::-1],
        "b.ids": np.zeros((4, 3, 2), np.int32).T,
        "scalar": np.zeros((), np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    found = ingot.numpy.load_file(file, backend=backend, out=out)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert name == "b.half" or found[name] is out[name]
    assert (wide[:, 0::4] == -1).all()


def test_columns_of_one_matrix_may_be_two_destinations(file: Path) -> None:
    both = np.zeros((6, 20), np.float32)
    out = {"a.weight": both[:, :10]}
    ingot.numpy.load_file(file, out=out)
    np.testing.assert_array_equal(both[:, :10], ARRAYS["a.weight"])
    assert not both[:, 10:].any()


def test_out_takes_slices_and_converts(file: Path, backend: str) -> None:
    out = {"a.weight": np.zeros((2, 6), np.float64).T}
    index = (slice(None), [7, 2])
    ingot.numpy.load_file(file, backend=backend, slices={"a.weight": index}, dtype="float64", out=out)
    np.testing.assert_array_equal(out["a.weight"], ARRAYS["a.weight"][index].astype(np.float64))


def read_only() -> np.ndarray:
    array = np.zeros((6, 10), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ({"a.weight": np.zeros((10, 6), np.float32)}, "destination-shape"),
        ({"a.weight": np.zeros((6, 10), np.float64)}, "destination-dtype"),
        ({"a.weight": np.zeros((6, 10), ">f4")}, "destination-dtype"),
        ({"a.weight": read_only()}, "destination"),
        (
            {"a.weight": np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (6, 10), (4, 4))},
            "destination-overlap",
        ),
    ],
)
def test_memory_that_does_not_fit_is_refused(file: Path, out: dict[str, np.ndarray], code: str) -> None:
    with pytest.raises(ingot.DestinationError, match=r"tensor `a\.weight`") as caught:
        ingot.numpy.load_file(file, out=out)
    assert (caught.value.code, caught.value.tensor) == (code, "a.weight")


def test_nothing_is_read_before_all_destinations_are_checked(file: Path) -> None:
    base = np.zeros(60, np.float32)
    fine, bad = np.zeros(6), np.zeros((3, 4), np.float32)
    for out in (
        {"a.bias": fine, "b.half": bad},
        {"a.bias": fine, "a.weight": base.reshape(6, 10), "scalar": base[3:4].reshape(())},
    ):
        with pytest.raises(ingot.DestinationError):
            ingot.numpy.load_file(file, out=out)
        assert not fine.any()
        assert not base.any()
