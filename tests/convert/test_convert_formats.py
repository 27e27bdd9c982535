"""Detection of a file's format, and errors for files of unknown formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy
import pytest
import torch

import ingot
from ingot._convert import listed
from ingot._convert.formats import _BY_CONTENT, _FIRST_BYTES, FORMATS, resolved
from ingot.numpy import load_file, save_file
from support.errors import raises

ONE = {"a": numpy.ones(3, numpy.float32)}


def test_formats_have_a_signature_and_a_module() -> None:
    by_folder = {"savedmodel"}
    by_framing = {"safetensors", "bintensors"}
    assert set(FORMATS) == set(_BY_CONTENT) | set(_FIRST_BYTES) | by_folder | by_framing
    folder = Path(ingot.__file__).parent / "_convert" / "sources"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {format.reader.partition(".")[0] for format in FORMATS.values()} == modules


@pytest.mark.parametrize(
    "name", ["model.bin", "model.npz", "model.onnx", "model.h5", "model", "model.safetensors"]
)
def test_convert_detects_the_format_from_the_contents(name: str) -> None:
    torch.save({"a": torch.ones(3)}, name)
    assert resolved(name, None) == (name, "torch")
    save_file(ONE, name, format="safetensors")
    assert resolved(name, None) == (name, "safetensors")
    save_file(ONE, name, format="bintensors")
    assert resolved(name, None) == (name, "bintensors")
    with open(name, "wb") as file:
        numpy.savez(file, a=ONE["a"])
    assert resolved(name, None) == (name, "npz")
    os.remove(name)
    with h5py.File(name, "w") as archive:
        archive["a"] = ONE["a"]
    assert resolved(name, None) == (name, "hdf5")


def test_convert_reads_safetensors_whose_length_spells_another_format() -> None:
    # The length of the header is 0x04034b50, which are the first bytes of a ZIP archive.
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    length = int.from_bytes(b"PK\3\4", "little")
    with open("in.bin", "wb") as file:
        file.write(length.to_bytes(8, "little") + header.ljust(length) + b"x")
    assert resolved("in.bin", None) == ("in.bin", "safetensors")
    ingot.convert("in.bin", "out.bt")
    assert load_file("out.bt")["a"].tolist() == [ord("x")]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "LFS"),
        (b"<!DOCTYPE html><html>not found</html>", "HTML page"),
        (b"", "too short"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "packed by gzip: unpack it first"),
        (b"PK\3\4" + bytes(100), "a ZIP archive of an unknown kind"),
        (b"PAR1" + bytes(100), "a truncated Parquet file"),
        (b"hello, this is a text that says nothing", "not a file of a known format"),
    ],
    ids=["lfs", "html", "empty", "gzip", "zip", "parquet", "text"],
)
def test_convert_names_an_unknown_format(data: bytes, words: str) -> None:
    Path("in.bin").write_bytes(data)
    with raises(ingot.ConversionError, f"^in.bin: .*{words}", code="unknown-format", path="in.bin"):
        ingot.convert("in.bin", "out.safetensors")


def test_convert_escapes_names_in_messages() -> None:
    torch.save({"\x1b[31m\u202ered": torch.ones(2, dtype=torch.complex128)}, "evil\x1b.bin")
    with pytest.raises(ingot.ConversionError) as caught:
        ingot.convert("evil\x1b.bin", "out.safetensors")
    assert "\x1b" not in str(caught.value)
    assert r"tensor `\x1b[31m\u202ered`" in str(caught.value)
    assert caught.value.tensor == "\x1b[31m\u202ered"


def test_convert_raises_file_not_found_for_a_missing_file() -> None:
    with pytest.raises(FileNotFoundError):
        ingot.convert("gone.bin", "out.safetensors")


def test_convert_takes_a_folder_with_one_checkpoint() -> None:
    Path("folder").mkdir()
    with pytest.raises(ingot.ConversionError, match="folder: a folder with 0 files"):
        ingot.convert("folder", "out.safetensors")
    torch.save({"a": torch.ones(3)}, "folder/pytorch_model.bin")
    Path("folder/readme.txt").write_text("text")
    ingot.convert("folder", "out.safetensors")
    torch.save({"b": torch.ones(3)}, "folder/other.bin")
    with raises(ingot.ConversionError, r"2 files that could be converted: other.bin, pyt", code="ambiguous"):
        ingot.convert("folder", "other.safetensors")
    save_file(ONE, "folder/model.safetensors")
    assert ingot.convert("folder", "other.safetensors").source_format == "safetensors"


def test_convert_finds_in_a_folder_what_load_file_finds() -> None:
    Path("folder").mkdir()
    for number in (1, 2):
        save_file({f"w{number}": numpy.ones(2)}, f"folder/model.fp16-{number:05}-of-00002.safetensors")
    with raises(ingot.ConversionError, "without their index", code="missing-index"):
        ingot.convert("folder", "out.safetensors")
    weight_map = {f"w{number}": f"model.fp16-{number:05}-of-00002.safetensors" for number in (1, 2)}
    index = {"metadata": {}, "weight_map": weight_map}
    Path("folder/model.safetensors.index.fp16.json").write_text(json.dumps(index))
    torch.save({"a": torch.ones(3)}, "folder/optimizer.pt")
    assert ingot.convert("folder", "out.safetensors").source_format == "sharded"
    assert load_file("out.safetensors").keys() == load_file("folder").keys() == {"w1", "w2"}


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.bin", "pytorch_model.bin"])
def test_convert_finds_the_model_in_the_folder_of_a_trainer(name: str) -> None:
    Path("folder").mkdir()
    for other in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        torch.save({"other": torch.ones(3)}, f"folder/{other}")
    if name.endswith(".bin"):
        torch.save({"a": torch.ones(3)}, f"folder/{name}")
    else:
        save_file(ONE, f"folder/{name}")
    ingot.convert("folder", "out.safetensors")
    assert load_file("out.safetensors").keys() == {"a"}


@pytest.mark.parametrize("path", ["", "pytorch_model-00001-of-00004.bin", "model-00001-of-00004.safetensors"])
def test_convert_rejects_one_shard_of_a_model(path: str) -> None:
    Path("folder").mkdir()
    name = path or "pytorch_model-00001-of-00004.bin"
    if name.endswith(".bin"):
        torch.save({"a": torch.ones(3)}, f"folder/{name}")
    else:
        save_file(ONE, f"folder/{name}")
    with raises(ingot.ConversionError, "part 1 of 4", code="part"):
        ingot.convert(f"folder/{path}", "out.safetensors")
    word = "torch" if name.endswith(".bin") else "safetensors"
    assert ingot.convert(f"folder/{name}", "out.safetensors", source_format=word).tensors == 1
    assert listed(f"folder/{name}").tensors[0].name == "a"


def test_convert_takes_paths_of_every_kind(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "in.safetensors")
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "a.bt")
    ingot.convert(os.fsencode(tmp_path / "in.safetensors"), os.fsencode(tmp_path / "b.bt"))
    assert Path("a.bt").read_bytes() == Path("b.bt").read_bytes()
    with pytest.raises(TypeError):
        ingot.convert(5, "out.bt")  # type: ignore[arg-type]
