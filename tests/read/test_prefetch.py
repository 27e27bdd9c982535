"""`safe_open.prefetch` reads tensors, or rows of them, in the background, and returns each once."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_type

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises

TENSORS = {
    "rows": numpy.arange(60, dtype="f4").reshape(20, 3),
    "whole": numpy.arange(7, dtype="i8"),
    "scalar": numpy.array(3.0),
    "nothing": numpy.zeros((0, 4), "f4"),
}
# Slices of the 20 rows.
PARTS = [
    slice(None),
    slice(0, 20),
    slice(3, 7),
    slice(-5, None),
    slice(None, -5),
    slice(-20, 20, 1),
    slice(4, 4),
    slice(9, 2),
    slice(20, None),
    slice(numpy.int64(1), numpy.uint8(3)),
]


@pytest.fixture(params=["mmap", "pread", "buffer", "object", "sharded"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Sources of every kind, with their options."""
    ingot.numpy.save_file(TENSORS, tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    if request.param == "buffer":
        return bytearray(data), {}
    if request.param == "object":
        return io.BytesIO(data), {}
    if request.param == "sharded":
        ingot.split(tmp_path / "t", tmp_path / "shards", 100)
        return tmp_path / "shards", {}
    return tmp_path / "t", {"backend": request.param}


def test_prefetch_returns_every_tensor_once(source: tuple[Any, dict[str, Any]]) -> None:
    with ingot.safe_open(source[0], "np", **source[1]) as file:
        order = file.offset_keys()
        loader = file.prefetch()
    with loader:
        assert loader.names() == order
        assert len(loader) == len(TENSORS)
        taken = loader.take("whole")
        assert taken.tolist() == TENSORS["whole"].tolist()
        rest = dict(loader)
        assert list(rest) == [name for name in order if name != "whole"]
        for name, array in rest.items():
            assert (array.dtype, array.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
            assert array.tolist() == TENSORS[name].tolist()
        assert list(loader) == []
        for name in TENSORS:
            with raises(ingot.SafetensorError, "once", code="taken"):
                loader.take(name)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_prefetch_reads_the_rows_of_a_plan(source: tuple[Any, dict[str, Any]], part: slice) -> None:
    with ingot.safe_open(source[0], "np", **source[1]) as file:
        loader = file.prefetch({"scalar": None, "rows": part}, threads=2)
    with loader:
        assert sorted(loader.names()) == ["rows", "scalar"]
        assert loader.take("rows").tolist() == TENSORS["rows"][part].tolist()
        assert next(iter(loader))[0] == "scalar"
        with pytest.raises(ingot.TensorNotFoundError, match="`whole` is not in the plan"):
            loader.take("whole")


def test_prefetch_reads_only_the_plan() -> None:
    read: list[tuple[int, int]] = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            begin, data = self.tell(), super().read(size)
            read.append((begin, len(data)))
            return data

    rows = numpy.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    data = ingot.numpy.save({"rows": rows})
    with ingot.safe_open(Counted(data), "np") as file:
        read.clear()
        with file.prefetch({"rows": slice(512, 520)}) as loader:
            assert loader.take("rows").tolist() == rows[512:520].tolist()
    assert sum(nbytes for _, nbytes in read) < 8 * 4096 + (256 << 10)


def test_prefetch_bounds_waiting_tensors(tmp_path: Path) -> None:
    arrays = {f"t{number}": numpy.full(1000, number, "f8") for number in range(9)}
    ingot.numpy.save_file(arrays, tmp_path / "t")
    # There is room for one tensor, so that the last one is read out of order.
    with ingot.safe_open(tmp_path / "t", "np", backend="pread").prefetch(ahead=8000, threads=3) as loader:
        assert loader.take("t8")[0] == 8
        assert [(name, int(array[0])) for name, array in loader] == [(f"t{i}", i) for i in range(8)]


def test_prefetch_sends_tensors_to_the_device(tmp_path: Path) -> None:
    ingot.torch.save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "t")
    file = ingot.safe_open(tmp_path / "t", "pt", "meta")
    for device, expected in (
        (None, {"a": "meta", "b": "meta"}),
        ("cpu", {"a": "cpu", "b": "cpu"}),
        ({"a": "cpu", "*": "meta"}, {"a": "cpu", "b": "meta"}),
        (lambda info: "cpu" if info.nbytes > 8 else "meta", {"a": "meta", "b": "cpu"}),
    ):
        with file.prefetch(device=device) as loader:
            assert {name: tensor.device.type for name, tensor in loader} == expected
    with raises(ingot.OptionError, "no pattern of device", code="no-device"):
        file.prefetch(device={"a": "cpu"})
    with file.prefetch({"a": None}, device={"a": "cpu"}) as loader:
        assert loader.take("a").tolist() == [0, 0]


def test_prefetch_reports_a_failing_tensor_alone(tmp_path: Path) -> None:
    specs = {
        "bad": {"dtype": "F6_E2M3", "shape": [4], "data": b"123"},
        "good": {"dtype": "F32", "shape": [1], "data": bytes(4)},
    }
    ingot.serialize_file(specs, tmp_path / "t")
    with ingot.safe_open(tmp_path / "t", "pt").prefetch() as loader:
        with pytest.raises(ingot.DtypeError, match="bad"):
            loader.take("bad")
        assert loader.take("good").tolist() == [0]


@pytest.mark.parametrize(
    ("plan", "kind", "said"),
    [
        (["rows"], TypeError, "plan must be a dict or None, found list"),
        ({"rows": 3}, TypeError, "tensor `rows`: plan needs None or a slice of ints, found 3"),
        ({"rows": slice("a")}, TypeError, "tensor `rows`: plan needs None or a slice of ints"),
        ({"rows": slice(0, 2, 1.0)}, TypeError, "tensor `rows`: plan needs None or a slice of ints"),
        ({"row": None}, ingot.TensorNotFoundError, "`rows`"),
        (
            {"scalar": slice(0, 1)},
            ingot.SliceError,
            "expected rows of a tensor with a dimension, found a scalar",
        ),
        ({"rows": slice(0, 2, 2)}, ingot.SliceError, "expected a step of 1, found 2"),
        ({"rows": slice(None, None, 0)}, ingot.SliceError, "expected a step of 1, found 0"),
        ({"rows": slice(0, 21)}, ingot.SliceError, "expected bounds within its 20 rows, found 21"),
        ({"rows": slice(-21, None)}, ingot.SliceError, "expected bounds within its 20 rows, found -21"),
        (
            {"rows": slice(2**70)},
            ingot.SliceError,
            "bounds within its 20 rows, found 118059162",
        ),
    ],
)
def test_prefetch_rejects_a_bad_plan(tmp_path: Path, plan: Any, kind: type[Exception], said: str) -> None:
    ingot.numpy.save_file(TENSORS, tmp_path / "t")
    before = threading.enumerate()
    with ingot.safe_open(tmp_path / "t", "np") as file, pytest.raises(kind, match=said) as caught:
        file.prefetch(plan)
    if isinstance(caught.value, ingot.SliceError):
        assert (caught.value.code, caught.value.path) == ("invalid-plan", str(tmp_path / "t"))
        assert caught.value.tensor in plan
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= set(before)


def test_prefetch_of_an_empty_plan_is_empty(tmp_path: Path) -> None:
    ingot.numpy.save_file(TENSORS, tmp_path / "t")
    with ingot.safe_open(tmp_path / "t", "np").prefetch({}) as loader:
        assert list(loader) == []
        assert len(loader) == 0


def test_prefetch_after_close_returns_nothing(tmp_path: Path) -> None:
    ingot.numpy.save_file(TENSORS, tmp_path / "t")
    loader = ingot.safe_open(tmp_path / "t", "np").prefetch()
    first = loader.take("rows")
    assert "4 tensors" in repr(loader)
    loader.close()
    loader.close()
    assert "closed" in repr(loader)
    gc.collect()
    assert first.tolist() == TENSORS["rows"].tolist()
    calls: list[Callable[[], object]] = [
        lambda: loader.take("whole"),
        lambda: loader.take("unplanned"),
        lambda: next(iter(loader)),
    ]
    for call in calls:
        with pytest.raises(ingot.ClosedError):
            call()


def test_prefetch_serves_many_threads(tmp_path: Path) -> None:
    arrays = {f"t{number}": numpy.full(100, number) for number in range(200)}
    ingot.numpy.save_file(arrays, tmp_path / "t")
    file = ingot.safe_open(tmp_path / "t", "np")
    with file.prefetch(threads=2) as loader, ThreadPoolExecutor(8) as pool:
        found = [pair for part in pool.map(lambda _: list(loader), range(8)) for pair in part]
    assert len(found) == 200
    assert {name: int(array[0]) for name, array in found} == {f"t{i}": i for i in range(200)}


def test_prefetch_has_types(tmp_path: Path) -> None:
    ingot.torch.save_file({"a": torch.zeros(2)}, tmp_path / "t")
    with ingot.safe_open(tmp_path / "t", "pt") as file:
        loader = file.prefetch({"a": slice(1)})
        assert_type(loader, ingot.PrefetchLoader[torch.Tensor])
        assert_type(loader.take("a"), torch.Tensor)
    assert type(loader) is ingot.PrefetchLoader
