"""Reading some tensors or parts, in another dtype, and into existing memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch
from ingot import OptionError, SliceError
from support.errors import raises

ARRAYS = {
    "a.weight": np.arange(60, dtype=np.float32).reshape(6, 10) / 7,
    "a.bias": np.arange(6, dtype=np.float64),
    "b.ids": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    "b.half": np.arange(12, dtype=np.float16).reshape(3, 4),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("less") / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    return path


@pytest.mark.parametrize("option", ["keys", "slices", "out"])
def test_load_file_suggests_the_nearest_name(file: Path, option: str) -> None:
    given = {"keys": ["weight"], "slices": {"weight": 0}, "out": {"weight": np.zeros(1)}}[option]
    with pytest.raises(ingot.TensorNotFoundError, match=r"did you mean `a\.weight`"):
        ingot.numpy.load_file(file, **{option: given})


@pytest.mark.parametrize("option", ["slices", "out"])
def test_load_file_rejects_options_for_unselected_tensors(file: Path, option: str) -> None:
    with raises(ingot.OptionError, f"{option} has tensor `scalar`", code="not-selected", tensor="scalar"):
        ingot.numpy.load_file(file, keys="a.*", **{option: {"scalar": ...}})


PARTS = st.one_of(
    st.integers(-3, 2),
    st.slices(8).filter(lambda part: part.step is None or part.step > 0),
    st.just(...),
    st.none(),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.lists(PARTS, max_size=4).map(tuple), dtype=st.sampled_from([None, "float16", "float64"]))
def test_load_file_slices_equal_numpys(
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
def test_load_file_rejects_a_file_that_is_shortened_between_columns(long: Path, backend: str) -> None:
    def shorten(done: int, total: int) -> None:
        if 0 < done < total:
            os.truncate(long, 4096)

    out = {"table": np.zeros((16 << 10, 512), np.int16)}
    slices = {"table": (slice(None), slice(512))}
    with raises(ingot.StorageError, r"33554520.*4096", code="changed"):
        ingot.numpy.load_file(long, backend=backend, slices=slices, out=out, threads=1, progress=shorten)


def test_load_file_rejects_a_mask_with_a_destination(file: Path) -> None:
    out = {"a.weight": np.zeros(6, np.float32)}
    with pytest.raises(ingot.SliceError, match="only supported by frameworks, and not together with out"):
        ingot.numpy.load_file(file, slices={"a.weight": ARRAYS["a.weight"] > 0}, out=out)


def test_load_file_fills_out_in_place(file: Path, backend: str) -> None:
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


def test_load_file_fills_columns_of_one_matrix(file: Path) -> None:
    both = np.zeros((6, 20), np.float32)
    out = {"a.weight": both[:, :10]}
    ingot.numpy.load_file(file, out=out)
    np.testing.assert_array_equal(both[:, :10], ARRAYS["a.weight"])
    assert not both[:, 10:].any()


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
def test_load_file_rejects_unfit_memory(file: Path, out: dict[str, np.ndarray], code: str) -> None:
    with raises(ingot.DestinationError, r"tensor `a\.weight`", code=code, tensor="a.weight"):
        ingot.numpy.load_file(file, out=out)


def test_load_file_checks_all_destinations_before_reading(file: Path) -> None:
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


WHOLE = np.arange(240, dtype=np.float32).reshape(12, 20)
FRAMEWORKS = {"numpy": (ingot.numpy.load_file, np.array), "torch": (ingot.torch.load_file, torch.tensor)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ingot.numpy.save_file({"fused": WHOLE, "other": WHOLE[:2]}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(params=FRAMEWORKS, scope="module")
def framework(request):
    return FRAMEWORKS[request.param]


@pytest.mark.parametrize(
    ("index", "rows", "columns"),
    [
        ([range(2, 4), range(8, 10)], [2, 3, 8, 9], None),
        ((slice(None), [range(0, 20, 5), 3, range(9, 6, -1)]), None, [0, 5, 10, 15, 3, 9, 8, 7]),
        ([range(0), -1, range(-3, -1)], [11, 9, 10], None),
        ([range(4, 4)], [], None),
    ],
    ids=["rows", "columns", "negative", "nothing"],
)
def test_load_file_reads_ranges_as_indices(path, framework, backend, index, rows, columns):
    load, _ = framework
    expected = WHOLE[rows] if columns is None else WHOLE[:, columns]
    found = load(path, slices={"fused": index}, backend=backend)["fused"]
    np.testing.assert_array_equal(np.asarray(found), expected.reshape(-1, *expected.shape[1:]))
    with ingot.safe_open(path, "np", backend=backend) as file:
        np.testing.assert_array_equal(file.get_slice("fused")[index], expected)


def test_load_file_reads_none_as_a_new_dimension(path, framework):
    load, _ = framework
    found = load(path, slices={"fused": None})
    np.testing.assert_array_equal(np.asarray(found["fused"]), WHOLE[None], strict=True)


def test_load_file_rejects_a_range_past_the_end(path):
    with pytest.raises(SliceError, match="index 12 is out of range for dimension 0 of size 12"):
        ingot.numpy.load_file(path, slices={"fused": [range(10, 14)]})


def test_load_file_fills_several_destinations_from_one_tensor(path, framework, backend):
    load, make = framework
    qkv = make(np.zeros((12, 10), np.float32))
    other = make(np.zeros((2, 20), np.float32))
    # Like one of two ranks, which reads its half of each of three tensors that are stored as one.
    out = {"fused": [qkv[:4], qkv[4:8], qkv[8:]], "other": other}
    parts = [(slice(at, at + 4), slice(10, 20)) for at in (0, 4, 8)]
    found = load(path, slices={"fused": parts}, out=out, backend=backend)
    assert list(found) == ["other", "fused"] or list(found) == ["fused", "other"]
    assert all(one is given for one, given in zip(found["fused"], out["fused"], strict=True))
    np.testing.assert_array_equal(np.asarray(qkv), WHOLE[:, 10:])
    np.testing.assert_array_equal(np.asarray(other), WHOLE[:2])


@pytest.mark.parametrize(
    ("slices", "keys", "message"),
    [
        ({"fused": [0]}, None, "`fused`: out has a list of 2 .* found a list of 1"),
        ({"fused": slice(0, 1)}, None, "`fused`: out has a list of 2 .* found slice"),
        ({"other": 0}, None, "`fused`: out has a list of 2 .* found NoneType"),
        ({"fused": [0, 1]}, ["other"], "slices has tensor `fused`, which keys"),
    ],
)
def test_load_file_pairs_destinations_with_indices(path, framework, slices, keys, message):
    load, make = framework
    out = {"fused": [make(np.zeros(20, np.float32)) for _ in range(2)]}
    with pytest.raises(OptionError, match=message):
        load(path, slices=slices, out=out, keys=keys)


def test_load_file_rejects_a_list_of_destinations_without_slices(path, framework):
    load, make = framework
    with pytest.raises(
        TypeError, match=r"`fused`: .* found list: several destinations need a list of as many indices"
    ):
        load(path, out={"fused": [make(np.zeros(20, np.float32))]})


def test_load_file_slices_aliases_into_destinations(tmp_path):
    whole = torch.tensor(WHOLE)
    path = tmp_path / "shared.safetensors"
    ingot.torch.save_file({"a": whole, "alias": whole, "view": whole[2:4]}, path, shared="alias")
    out = [torch.empty(2, 20), torch.empty(3, 20)]
    parts = [slice(0, 2), slice(5, 8)]
    ingot.torch.load_file(path, keys=["alias"], slices={"alias": parts}, out={"alias": out})
    assert torch.equal(torch.cat(out), torch.cat([whole[:2], whole[5:8]]))
    rows = [torch.empty(20), torch.empty(20)]
    ingot.torch.load_file(path, keys=["view"], slices={"view": [0, 1]}, out={"view": rows})
    assert torch.equal(torch.stack(rows), whole[2:4])


def test_load_file_rejects_overlapping_destinations_before_reading(path, framework):
    load, make = framework
    memory = make(np.zeros((3, 20), np.float32))
    out = {"fused": [memory[:2], memory[1:]]}
    with pytest.raises(ingot.DestinationError, match="`fused`"):
        load(path, slices={"fused": [slice(0, 2), slice(2, 4)]}, out=out)
    assert not np.asarray(memory).any()


# Messages number several destinations of a tensor: the first for `w` is `w[0]`, which is also a tensor here.
NAMES = ["w", "w[0]", "w[1]", "w[0][0]", "w[0][1]", "w.0", "[0]", ""]


@given(data=st.data(), backend=st.sampled_from(["mmap", "pread"]))
def test_load_file_keeps_names_of_destinations(named: Path, framework: Any, data: Any, backend: str) -> None:
    load, make = framework
    out: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for number, name in enumerate(NAMES):
        whole = WHOLE + number
        how = data.draw(st.sampled_from(["several", "one", "slice", "sliced into one", "whole"]), name)
        expected[name] = [whole]
        if how in ("several", "slice", "sliced into one"):
            rows = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3), name)
            slices[name] = rows if how == "several" else rows[0]
            expected[name] = [whole[row] for row in (rows if how == "several" else rows[:1])]
        if how in ("several", "one", "sliced into one"):
            memory = [make(np.zeros(part.shape, np.float32)) for part in expected[name]]
            out[name] = memory if how == "several" else memory[0]
    found = load(named, slices=slices, out=out, backend=backend)
    assert sorted(found) == sorted(NAMES)
    for name, parts in expected.items():
        several = found[name] if isinstance(found[name], list) else [found[name]]
        assert out.get(name) is None or isinstance(found[name], list) or found[name] is out[name]
        for one, part in zip(several, parts, strict=True):
            np.testing.assert_array_equal(np.asarray(one), part, strict=True)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named") / "model.safetensors"
    ingot.numpy.save_file({name: WHOLE + number for number, name in enumerate(NAMES)}, path)
    return path


def test_load_file_names_a_destination_that_does_not_fit(path, framework):
    load, make = framework
    out = {"fused": [make(np.zeros(20, np.float32)), make(np.zeros(7, np.float32))]}
    with raises(ingot.DestinationError, "`fused`", tensor="fused"):
        load(path, slices={"fused": [0, 1]}, out=out)
