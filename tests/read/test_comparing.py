"""`ingot.stats`, `ingot.diff` and `ingot.check`: the results of the commands as objects."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy

A = numpy.arange(12, dtype="f4").reshape(4, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    tensors = {"layer.10": A, "layer.2": A.astype("i4"), "nan": numpy.array([numpy.nan, 0.0, numpy.inf])}
    ingot.numpy.save_file(tensors, path, {"format": "np", "k": "v"})
    return path


def test_stats_returns_the_values_of_numpy(path: Path) -> None:
    found = ingot.stats(path, bins=2)
    assert list(found.tensors) == ["layer.2", "layer.10", "nan"]
    one = found.tensors["layer.10"]
    assert (one.dtype, one.count, one.min, one.max, one.mean) == ("F32", 12, 0.0, 11.0, A.mean())
    assert one.std == pytest.approx(A.std())
    assert (one.zeros, one.bins) == (1, (6, 6))
    assert isinstance(found.tensors["layer.2"].max, int)
    odd = found.tensors["nan"]
    assert (odd.nans, odd.infinities, odd.max) == (1, 1, 0.0)


def test_stats_keeps_the_order_of_keys(path: Path) -> None:
    assert list(ingot.stats(path, keys=["layer.10", "layer.2"]).tensors) == ["layer.10", "layer.2"]
    assert list(ingot.stats(path, keys="layer.*", drop="layer.2").tensors) == ["layer.10"]
    with pytest.raises(ingot.TensorNotFoundError, match=r"layer\.1`"):
        ingot.stats(path, keys="layer.1")


@pytest.mark.parametrize(("bins", "fault"), [(-1, ValueError), (1001, ValueError), (True, TypeError)])
def test_stats_refuses_bins_out_of_range(bins: int, fault: type[Exception], path: Path) -> None:
    with pytest.raises(fault, match="bins"):
        ingot.stats(path, bins=bins)


def test_stats_lists_tensors_without_values(tmp_path: Path) -> None:
    header = json.dumps({"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(3)
    assert ingot.stats(bytearray(data)).unread == {"six": "F6_E2M3"}


def test_diff_finds_every_difference(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.safetensors"
    ingot.numpy.save_file(
        {"layer.10": A + numpy.array([0, 1, 0], "f4"), "layer.2": A, "new": A}, other, {"format": "pt"}
    )
    found = ingot.diff(path, other)
    assert not found.equal
    assert list(found.tensors) == ["layer.2", "nan", "new"]
    before, after = found.tensors["layer.2"]
    assert [info and info.dtype for info in (before, after)] == ["I32", "F32"]
    assert found.tensors["new"][0] is found.tensors["nan"][1] is None
    assert found.metadata == {"format": ("np", "pt"), "k": ("v", None)}
    assert found.values is None
    values = ingot.diff(path, other, values=True, keys="layer.*").values
    assert values is not None
    assert list(values) == ["layer.10"]
    assert (values["layer.10"].different, values["layer.10"].max_abs) == (4, 1.0)


def test_diff_selects_tensors_of_either_file(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.safetensors"
    ingot.numpy.save_file({"new": A}, other, {"format": "np", "k": "v"})
    assert list(ingot.diff(path, other, keys="new").tensors) == ["new"]
    assert list(ingot.diff(path, other, keys=lambda info: info.dtype == "F32").tensors) == ["layer.10", "new"]
    with pytest.raises(ingot.TensorNotFoundError):
        ingot.diff(path, other, keys="nope")


def test_diff_of_a_file_with_itself_is_empty(path: Path) -> None:
    assert ingot.diff(path, memoryview(path.read_bytes()), values=True).equal


def test_check_finds_problems(path: Path) -> None:
    found = ingot.check(path, values=True)
    assert not found
    assert (found.tensors, found.source) == (3, str(path))
    assert [(one.kind, one.where) for one in found.problems] == [("nan", "nan"), ("infinity", "nan")]
    assert ingot.check(path)
    assert ingot.check(path, values=True, drop="nan").ok


def test_check_finds_misaligned_tensors_and_unenforced_rules(tmp_path: Path) -> None:
    entries = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "extra": 1}}
    entries["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(5)
    (tmp_path / "odd.safetensors").write_bytes(data)
    for source in (tmp_path / "odd.safetensors", memoryview(data)):
        assert [one.kind for one in ingot.check(source).problems] == ["not-strict", "misaligned"]


@pytest.mark.parametrize("backend", ["auto", "mmap", "pread"])
def test_stats_diff_and_check_read_sharded_checkpoints(backend: str, path: Path, tmp_path: Path) -> None:
    ingot.split(path, tmp_path / "shards", 60)
    assert ingot.stats(tmp_path / "shards", backend=backend, keys="layer.*") == ingot.stats(
        path, keys="layer.*"
    )
    assert ingot.check(tmp_path / "shards", backend=backend).ok
    found = ingot.diff(path, tmp_path / "shards", values=True, backend=backend)
    assert (found.tensors, found.values) == ({}, {})
    assert list(found.metadata) == ["format", "total_size"]


def test_results_are_pickled_and_shown_in_notebooks(path: Path) -> None:
    for found in (ingot.stats(path), ingot.diff(path, path), ingot.check(path, values=True)):
        assert pickle.loads(pickle.dumps(found)) == found
        assert found._repr_html_().startswith("<div>")
        assert repr(found).startswith(type(found).__name__)
