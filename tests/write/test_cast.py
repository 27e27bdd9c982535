"""`ingot.cast`: floats in another dtype, everything else as it was."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy
import pytest

import ingot
import ingot.numpy

FLOATS = numpy.linspace(-3, 3, 12, dtype="f4").reshape(4, 3)
TENSORS = {
    "a.weight": FLOATS,
    "a.norm": FLOATS[0],
    "ids": numpy.arange(5),
    "half": FLOATS.astype("f2"),
    "empty": numpy.zeros((0, 3), "f4"),
    "scalar": numpy.array(1.5, "f4"),
    "small": FLOATS.astype(ml_dtypes.float8_e4m3fn),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    ingot.numpy.save_file(TENSORS, path, {"title": "t"}, checksums=True)
    return path


def test_cast_converts_floats_and_copies_the_rest(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    found = ingot.cast(path, out, "bf16")
    assert set(found.cast) == {"a.weight", "a.norm", "half", "empty", "scalar", "small"}
    assert (found.dtype, found.tensors, found.destination) == ("BF16", len(TENSORS), str(out))
    loaded = ingot.numpy.load_file(out)
    assert found.nbytes == sum(info.nbytes for info in map(ingot.safe_open(out, "np").info, TENSORS))
    for name, before in TENSORS.items():
        expected = before.astype(ml_dtypes.bfloat16) if name in found.cast else before
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].tobytes() == expected.tobytes()
    assert ingot.safe_open(out, "np").metadata() == {"title": "t"}


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "F8_E5M2"])
def test_cast_reports_the_bytes_of_the_new_tensors(dtype: str, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    found = ingot.cast(path, out, dtype)
    assert found.nbytes == sum(info.nbytes for info in map(ingot.safe_open(out, "np").info, TENSORS))


def test_cast_converts_what_keys_selects(path: Path, tmp_path: Path) -> None:
    assert ingot.cast(path, tmp_path / "1", "F16", keys="a.*").cast == ("a.norm", "a.weight")
    assert ingot.cast(path, tmp_path / "2", "F16", keys=["a.norm"]).cast == ("a.norm",)
    small = ingot.cast(path, tmp_path / "3", numpy.float16, keys=lambda info: len(info.shape) == 1)
    assert small.cast == ("a.norm",)
    with pytest.raises(ingot.TensorNotFoundError, match=r"a\.norm"):
        ingot.cast(path, tmp_path / "4", "F16", keys="a.norms")
    assert not (tmp_path / "4").exists()


def test_cast_copies_packed_tensors_only_if_keys_leaves_them_out(tmp_path: Path) -> None:
    tensors = {"a": FLOATS, "four": numpy.zeros((2, 4), ml_dtypes.float4_e2m1fn)}
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ingot.numpy.save_file(tensors, path)
    with pytest.raises(ingot.DtypeError, match=r"`four`: F4 .* — leave the tensor out of keys"):
        ingot.cast(path, out, "BF16")
    assert not out.exists()
    assert ingot.cast(path, out, "BF16", keys="a").cast == ("a",)
    assert ingot.inspect(out).parameter_count == {"BF16": 12, "F4": 8}


def test_cast_keeps_names_that_share_a_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import ingot.torch

    base = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": base, "b": base, "row": base[1]}
    ingot.torch.save_file(tensors, tmp_path / "a.safetensors", shared="alias")
    ingot.cast(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "F16")
    loaded = ingot.torch.load_file(tmp_path / "b.safetensors", shared="alias")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor.half()) for name, tensor in tensors.items())
    assert loaded["row"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()


def test_cast_makes_one_file_of_a_sharded_checkpoint(path: Path, tmp_path: Path) -> None:
    ingot.split(path, tmp_path / "shards", 60)
    ingot.cast(tmp_path / "shards", tmp_path / "one.safetensors", "F16")
    ingot.cast(path, tmp_path / "two.safetensors", "F16", metadata=None)
    assert ingot.diff(tmp_path / "one.safetensors", tmp_path / "two.safetensors", values=True).values == {}


def test_cast_reads_a_buffer_and_writes_the_other_format(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.bt"
    data = memoryview(path.read_bytes())
    ingot.cast(data, out, "F16", keys="a.*", metadata={"k": "v"})
    assert ingot.safe_open(out, "np").format == "bintensors"
    assert ingot.safe_open(out, "np").metadata() == {"k": "v"}


class CountingStore:
    """A store of one file that records the positions of reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.begins: list[int] = []

    def head(self, path: str) -> dict[str, int]:
        return {"size": len(self.data)}

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        self.begins += starts
        return [self.data[begin:end] for begin, end in zip(starts, ends, strict=True)]


def test_cast_reads_the_header_once_and_keeps_the_metadata(tmp_path: Path) -> None:
    store = CountingStore(ingot.numpy.save({"a": numpy.ones(2, "f4")}, {"title": "t"}))
    ingot.cast(ingot.Ranges(store, "model.safetensors"), tmp_path / "out.safetensors", "F16")
    assert store.begins.count(0) == 1
    assert ingot.inspect(tmp_path / "out.safetensors").metadata == {"title": "t"}
