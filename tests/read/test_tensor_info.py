"""`TensorInfo`: one class for a tensor's entry in a header, returned by every function."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import TensorInfo

ARRAYS = {"w": numpy.zeros((2, 3), "f4"), "b": numpy.zeros(3, "f2"), "s": numpy.float64(1)}


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(ARRAYS, path)
    return path


def test_info_is_the_same_from_every_function(path: Path) -> None:
    chosen: list[TensorInfo] = []
    ingot.numpy.load_file(path, keys=lambda info: chosen.append(info) or True)
    described = ingot.inspect(path, count="stored").files_metadata[path.name].tensors
    with ingot.safe_open(path, "np") as file:
        told = {name: file.info(name) for name in file}
    assert all(type(info) is TensorInfo for info in [*chosen, *described.values(), *told.values()])
    assert {info.name: info for info in chosen} == described == told


def test_info_equals_the_header(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        info = file.info("w")
    assert (info.name, info.dtype, info.shape) == ("w", "F32", (2, 3))
    assert info.end - info.begin == info.nbytes == 24
    assert info.parameter_count == 6


def test_info_is_comparable_and_hashable() -> None:
    info = TensorInfo("w", "F32", [2, 3], 8, 32)
    same = TensorInfo(name="w", dtype="F32", shape=(2, 3), begin=8, end=32, parameter_count=6)
    assert info == same
    assert {info: 1}[same] == 1
    for other in (
        TensorInfo("v", "F32", [2, 3], 8, 32),
        TensorInfo("w", "I32", [2, 3], 8, 32),
        TensorInfo("w", "F32", [3, 2], 8, 32),
        TensorInfo("w", "F32", [2, 3], 0, 32),
        TensorInfo("w", "F32", [2, 3], 8, 40),
        TensorInfo("w", "F32", [2, 3], 8, 32, 0),
    ):
        assert info != other
    assert info != ("w", "F32", (2, 3), 8, 32, 6)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_info_is_pickled_copied_and_printed(protocol: int) -> None:
    info = TensorInfo('a "b"\n', "BF16", [4, 0], 2, 2)
    assert pickle.loads(pickle.dumps(info, protocol)) == info
    assert copy.deepcopy(info) == info
    assert eval(repr(info)) == info


def test_info_rejects_impossible_values() -> None:
    with pytest.raises(ValueError, match="end 1 is before begin 2"):
        TensorInfo("w", "F32", [], 2, 1)
    with pytest.raises(OverflowError, match="too many elements"):
        TensorInfo("w", "F32", [2**40, 2**40], 0, 0)
    with pytest.raises(OverflowError):
        TensorInfo("w", "F32", [-1], 0, 0)
    with pytest.raises(AttributeError):
        TensorInfo("w", "F32", [], 0, 4).name = "v"  # type: ignore[misc]
