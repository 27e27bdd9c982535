"""safetensors and .bt files begin with a number, whose bytes may equal the first bytes of another format."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

import ingot
import ingot.numpy
from ingot._convert.formats import resolved

LENGTHS = range(256)
VALUE = b"x"


def safetensors_of(length: int) -> bytes:
    """Return a file whose header has `length` bytes."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return length.to_bytes(8, "little") + header.ljust(length) + VALUE


def bintensors_of(length: int) -> bytes:
    """Return a .bt file whose header has `length` bytes: one tensor with a long name and one dimension."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 251 else b"\xfb" + value.to_bytes(2, "little")

    # The name gets all bytes but those of: no metadata, one tensor, its dtype, rank, size, begin and end.
    name = length - 7 - len(number(length - 10))
    padding = length - 7 - len(number(name)) - name
    header = b"\0\1" + number(name) + b"n" * name + b"\1\1\1\0\1" + b" " * padding
    assert len(header) == length
    return length.to_bytes(8, "little") + header + VALUE


OURS = [(safetensors_of, ".safetensors"), (bintensors_of, ".bt")]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("make", "ending"), OURS, ids=["safetensors", "bintensors"])
def test_sniffing_reads_a_header_of_any_length_under_any_name(make: object, ending: str) -> None:
    assert callable(make)
    word = make.__name__.removesuffix("_of")
    for rest in LENGTHS:
        # At least 512: the second byte of such a length is then a possible protocol number of a pickle.
        for length in (512 + rest, 768 + rest, 1024 + rest, 1280 + rest):
            data = make(length)
            name = ("in.bin", "in.onnx", "in.msgpack", "in.pdparams", f"in{ending}")[length % 5]
            Path(name).write_bytes(data)
            assert resolved(name, None) == (name, word), length
    Path("in.bin").write_bytes(make(640))
    ingot.convert("in.bin", "out.safetensors")
    assert [array.tobytes() for array in ingot.numpy.load_file("out.safetensors").values()] == [VALUE]


@pytest.mark.parametrize("make", [safetensors_of, bintensors_of])
def test_sniffing_reads_the_shards_of_an_index(make: object) -> None:
    assert callable(make)
    for length in (128 + 512, 128 + 1024, 896):
        data = make(length)
        name = next(iter(ingot.numpy.load(data)))
        Path("shard.safetensors").write_bytes(data)
        Path("model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {name: "shard.safetensors"}})
        )
        ingot.convert("model.safetensors.index.json", "out.safetensors", overwrite=True)
        assert ingot.numpy.load_file("out.safetensors")[name].tobytes() == VALUE


@pytest.mark.parametrize(
    "begin",
    [
        b"MZ\0\0",
        b"#!\0\0",
        b"BM\0\0",
        b"\x1f\x8b\x08\0",
        b"\x80\x02\0\0",
        b"PK\3\4",
        b"\x08\x08\0\0",
        b"{ \0\0",
    ],
)
def test_sniffing_reads_a_length_that_spells_another_format(begin: bytes) -> None:
    data = safetensors_of(int.from_bytes(begin, "little"))
    assert data.startswith(begin)
    # The file name and the first bytes belong to another format.
    Path("in.onnx").write_bytes(data)
    assert resolved("in.onnx", None) == ("in.onnx", "safetensors")


def test_sniffing_ignores_tensor_bytes() -> None:
    torch.save({"other": torch.ones(3)}, "inner.pt")
    inner = numpy.frombuffer(Path("inner.pt").read_bytes(), "u1")
    assert zipfile.is_zipfile("inner.pt")
    for name in ("in.safetensors", "in.bt"):
        ingot.numpy.save_file({"inner": inner}, name)
        assert zipfile.is_zipfile(name), "Python finds the archive at the end"
        ingot.convert(name, "out.safetensors", overwrite=True)
        assert list(ingot.numpy.load_file("out.safetensors")) == ["inner"]


@pytest.mark.parametrize(("make", "ending"), OURS, ids=["safetensors", "bintensors"])
def test_sniffing_names_a_broken_file_by_its_suffix(make: object, ending: str) -> None:
    assert callable(make)
    for length in (640, 896, 520):
        for cut in (9, length, length + 8):
            Path(f"in{ending}").write_bytes(make(length)[:cut])
            with pytest.raises(ingot.HeaderError):
                ingot.convert(f"in{ending}", "out.safetensors")


def test_sniffing_reads_an_index_by_its_name() -> None:
    ingot.numpy.save_file({"a": numpy.ones(3)}, "in.index.json", format="safetensors")
    with pytest.raises(ingot.CheckpointError):
        ingot.convert("in.index.json", "out.safetensors")
    Path("in.index.json").write_text("hello")
    with pytest.raises(ingot.ConversionError) as caught:
        ingot.convert("in.index.json", "out.safetensors")
    assert caught.value.code == "unknown-format"
