"""Types as a checker sees them. The checker reads this file; running it tests the calls."""

from __future__ import annotations

import asyncio
import io
from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot.typing import Source


def test_numpy(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    arrays = {"t": numpy.zeros(3)}
    assert_type(ingot.numpy.save(arrays, {"k": "v"}, format="bintensors"), bytes)
    ingot.numpy.save_file(
        arrays,
        path,
        None,
        format=None,
        durable=False,
        atomic=True,
        write_options={"replace_read_only": False},
    )
    assert_type(ingot.numpy.load_file(path, backend="pread"), dict[str, numpy.ndarray[Any, numpy.dtype[Any]]])
    assert_type(ingot.numpy.load(path.read_bytes()), dict[str, numpy.ndarray[Any, numpy.dtype[Any]]])


def test_torch(tmp_path: Path) -> None:
    path = str(tmp_path / "t.safetensors")
    tensors = {"t": torch.nn.Parameter(torch.zeros(3))}
    assert_type(ingot.torch.save(tensors, {"k": "v"}, format="safetensors"), bytes)
    ingot.torch.save_file(
        tensors,
        path,
        None,
        format="bintensors",
        durable=None,
        atomic=True,
        write_options={"replace_read_only": False},
    )
    assert_type(ingot.torch.load_file(path, "cpu", backend="auto"), dict[str, torch.Tensor])
    assert_type(ingot.torch.load(bytearray(ingot.torch.save(tensors))), dict[str, torch.Tensor])
    ingot.torch.save_file(tensors, path, shared="alias", contiguous="error", durable=False)
    assert_type(ingot.torch.load_file(path, shared="alias"), dict[str, torch.Tensor])
    model = torch.nn.Linear(2, 2)
    ingot.torch.save_model(model, path, {"k": "v"}, force_contiguous=True)
    assert_type(ingot.torch.load_model(model, path, strict=True, device="cpu"), tuple[set[str], list[str]])


def test_handles(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    ingot.numpy.save_file({"t": numpy.zeros((2, 3))}, path)
    with ingot.safe_open(path, framework="np", device="cpu", backend="auto", strict=True) as file:
        assert_type(file, ingot.safe_open[numpy.ndarray[Any, numpy.dtype[Any]]])
        assert_type(file.keys(), list[str])
        assert_type(file.offset_keys(), list[str])
        assert_type(file.metadata(), dict[str, Any] | None)
        assert_type(file.get_tensors(["t"]), dict[str, numpy.ndarray[Any, numpy.dtype[Any]]])
        assert_type(len(file), int)
        assert_type("t" in file, bool)
        assert_type(iter(file), Iterator[str])
        assert_type(file.items(), ItemsView[str, numpy.ndarray[Any, numpy.dtype[Any]]])
        assert_type(file.path, str)
        assert_type(file.format, str)
        assert_type(file.backend, str)
        assert_type(file.why, str)
        part = file.get_slice("t")
        assert_type(part.get_shape(), list[int])
        assert_type(part.get_dtype(), str)
        info = file.info("t")
        assert_type(info.shape, tuple[int, ...])
        assert_type(info.nbytes, int)
    with ingot.open(path) as plain, ingot.safe_open(path) as also, ingot.open(path, "pt", confine=True) as pt:
        assert_type(plain, ingot.safe_open[numpy.ndarray[Any, numpy.dtype[Any]]])
        assert_type(also, ingot.safe_open[numpy.ndarray[Any, numpy.dtype[Any]]])
        assert_type(pt, ingot.safe_open[torch.Tensor])


def test_sources(tmp_path: Path) -> None:
    data = ingot.numpy.save({"t": numpy.zeros((2, 3))})
    (tmp_path / "t.safetensors").write_bytes(data)
    with (tmp_path / "t.safetensors").open("rb") as file:
        sources: list[Source] = [str(tmp_path), tmp_path, file, io.BytesIO(data), bytearray(data)]
        sources += [memoryview(data)]
        for source in sources:
            assert_type(ingot.inspect(source), ingot.RepoMetadata)
            assert_type(ingot.hash(source) if not isinstance(source, (str, Path)) else "", str)
    with pytest.raises(TypeError, match="found int"):
        ingot.inspect(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found int"):
        ingot.open(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="did you mean 'backend'"):
        ingot.open(data, backends="mmap")  # type: ignore[call-overload]


def test_buffers() -> None:
    data = ingot.serialize({"t": {"dtype": "F32", "shape": [1], "data": b"abcd"}})
    assert_type(data, bytes)
    assert_type(ingot.deserialize(memoryview(data)), list[tuple[str, dict[str, Any]]])
    assert_type(ingot.__version__, str)


def test_errors() -> None:
    error = ingot.HeaderError("text", code="hole", begin=1)
    assert_type(error.code, str | None)
    assert_type(error.tensor, str | None)
    assert_type(error.begin, int | None)


def test_editing(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {"t": torch.zeros(3)}
    ingot.torch.save_file(
        tensors, path, {"k": "v"}, write_options={"reserve_header": 100, "align": 64}, durable=False
    )
    assert_type(ingot.inspect(path).metadata, dict[str, Any] | None)
    assert_type(
        ingot.torch.load_file(path, return_metadata=True),
        tuple[dict[str, torch.Tensor], dict[str, str] | None],
    )
    assert ingot.update_metadata(path, {"a": "b", "k": None}, durable=False) == "in-place"
    ingot.replace_tensor(path, "t", numpy.zeros(3, numpy.float32), durable=False)
    ingot.rewrite(path, tmp_path / "out.bt", keys=["t"], rename={"t": "u"}, durable=False, overwrite=True)
    ingot.merge(
        [path, tmp_path / "out.bt"], path, on_duplicate="first", metadata=None, durable=False, overwrite=True
    )
    ingot.split(path, tmp_path / "shards", "1GB", durable=False, overwrite=True)
    with ingot.Writer(path, {"t": ("F32", [3])}, {"k": "v"}, durable=False, overwrite=True) as writer:
        assert_type(writer, ingot.Writer)
        assert_type(ingot.Writer.join(path), ingot.Writer)
        writer.write("t", torch.zeros(3), ...)
        writer.commit()
    with (tmp_path / "stream").open("wb") as file:
        assert_type(ingot.torch.save_file(tensors, file), None)


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    ingot.numpy.save_file({"t": numpy.zeros((2, 3))}, path, durable=False)
    found = ingot.inspect(path, count="logical", config={"text_config": {}}, max_header_size=1000)
    assert_type(found, ingot.RepoMetadata)
    assert_type(found.metadata, dict[str, Any] | None)
    assert_type(found.parameter_count, dict[str, int])
    assert_type(found.parameter_total, int)
    file = found.files_metadata["t.safetensors"]
    assert_type(file, ingot.FileMetadata)
    assert_type(file.tensors["t"], ingot.TensorInfo)
    assert_type(file.tensors["t"].shape, tuple[int, ...])
    assert_type(hash(file.tensors["t"]), int)

    async def later() -> None:
        assert_type(await ingot.inspect_async(path, count="stored"), ingot.RepoMetadata)

    asyncio.run(later())
