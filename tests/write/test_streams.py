"""Saving to an object with a `write` instead of a file with a name."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import py
import pytest
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot._base.options import Saving
from ingot.typing import Writable
from support.errors import raises
from support.processes import run
from support.progress import Progress, Stopped, stop

ARRAYS = {
    "rows": numpy.arange(600, dtype="f4").reshape(20, 30),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "big-endian": numpy.arange(5, dtype=">i4"),
    "large": numpy.ones(3 << 20, "f4"),
    "scalar": numpy.array(7),
    "nothing": numpy.zeros((0, 4)),
}
DIGESTS: tuple[Any, ...] = (True, "sha256", "xxh3", "xxh3_128", "modelspec", ["blake3", "modelspec"])


class Dribble(io.RawIOBase):
    """A raw file that writes a few bytes per call."""

    def __init__(self, most: int) -> None:
        self.taken = bytearray()
        self.most = most

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        part = bytes(data)[: self.most]
        self.taken += part
        return len(part)


class Uploads:
    """An object with only a `write` method, which returns None."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any, /) -> None:
        self.pieces.append(bytes(data))


@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
def test_save_file_writes_the_same_bytes_to_a_stream(tmp_path: Path, format: Any) -> None:
    expected = ingot.numpy.save(ARRAYS, {"k": "v"}, format=format)
    memory, dribble, uploads = io.BytesIO(), Dribble(100_000), Uploads()
    for file in (memory, dribble, uploads):
        assert ingot.numpy.save_file(ARRAYS, file, {"k": "v"}, format=format) is None
    assert memory.getvalue() == expected == dribble.taken == b"".join(uploads.pieces)
    assert max(map(len, uploads.pieces)) <= 4 << 20
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as outer, outer.open("model", "w") as inner:
        ingot.numpy.save_file(ARRAYS, inner, {"k": "v"}, format=format)
    assert zipfile.ZipFile(archive).read("model") == expected
    with gzip.open(tmp_path / "packed", "wb", compresslevel=1) as packed:
        ingot.numpy.save_file(ARRAYS, packed, {"k": "v"}, format=format)
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == expected
    with fsspec.open(f"memory://streams/{format}", "wb") as remote:
        ingot.numpy.save_file(ARRAYS, remote, {"k": "v"}, format=format)
    assert fsspec.filesystem("memory").cat(f"/streams/{format}") == expected


def test_save_file_writes_at_the_position_of_an_open_file(tmp_path: Path) -> None:
    expected = ingot.numpy.save(ARRAYS)
    for number, opens in enumerate(
        (
            lambda path: open(path, "wb"),  # noqa: SIM115
            lambda path: open(path, "wb", buffering=0),  # noqa: SIM115
            lambda path: fsspec.filesystem("file").open(path, "wb"),
            lambda path: tempfile.NamedTemporaryFile(dir=tmp_path, prefix=Path(path).name),  # noqa: SIM115
        )
    ):
        with opens(str(tmp_path / f"t{number}")) as file:
            file.write(b"before")
            ingot.numpy.save_file(ARRAYS, file)
            assert not file.closed
            file.write(b"after")
            file.flush()
            assert Path(file.name).read_bytes() == b"before" + expected + b"after"


def test_save_file_treats_a_path_with_a_write_method_as_a_path(tmp_path: Path) -> None:
    path = py.path.local(tmp_path / "t")
    ingot.numpy.save_file(ARRAYS, path, durable=False)
    assert Path(path).read_bytes() == ingot.numpy.save(ARRAYS)


def test_save_file_writes_to_a_pipe_and_a_socket() -> None:
    expected = ingot.numpy.save(ARRAYS)

    def received(write: Any, read: Any) -> bytes:
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read.read()))
        reader.start()
        with write:
            ingot.numpy.save_file(ARRAYS, write)
        reader.join()
        return got[0]

    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as read:
        assert received(os.fdopen(write_end, "wb", buffering=0), read) == expected
    ours, theirs = socket.socketpair()
    write, read = ours.makefile("wb", buffering=0), theirs.makefile("rb")
    ours.close()
    with theirs, read:
        assert received(write, read) == expected
    program = "import ingot.numpy, numpy, sys; "
    program += "ingot.numpy.save_file({'a': numpy.arange(3.0)}, sys.stdout.buffer)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert ingot.numpy.load(said)["a"].tolist() == [0, 1, 2]


def test_save_model_writes_to_a_stream(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    memory = io.BytesIO()
    ingot.torch.save_model(model, memory, {"step": "1"})
    ingot.torch.save_model(model, path, {"step": "1"})
    assert memory.getvalue() == path.read_bytes()


def test_save_file_to_a_stream_handles_shared_memory(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    tied, memory = {"a": weight, "b": weight}, io.BytesIO()
    with pytest.raises(ingot.SharedMemoryError):
        ingot.torch.save_file(tied, memory)
    assert memory.getvalue() == b""
    for shared in ("copy", "alias"):
        memory = io.BytesIO()
        ingot.torch.save_file(tied, memory, shared=shared)  # type: ignore[arg-type]
        ingot.torch.save_file(tied, tmp_path / "t", shared=shared, durable=False)  # type: ignore[arg-type]
        assert memory.getvalue() == (tmp_path / "t").read_bytes()
    assert safetensors.torch.load(memory.getvalue()).keys() == {"a"}


@pytest.mark.parametrize("checksums", DIGESTS, ids=str)
@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
def test_save_file_to_a_stream_takes_digests_and_layout(tmp_path: Path, format: Any, checksums: Any) -> None:
    options: dict[str, Any] = {"format": format, "checksums": checksums}
    if format == "safetensors":
        options["write_options"] = {"reserve_header": 1000, "align": 4096}
    path, memory = tmp_path / "t", io.BytesIO()
    ingot.numpy.save_file(ARRAYS, path, {"k": "v"}, durable=False, **options)
    ingot.numpy.save_file(ARRAYS, memory, {"k": "v"}, **options)
    assert memory.getvalue() == path.read_bytes()
    assert not ingot.verify(path, raises=False).bad


def test_save_file_to_a_stream_notices_a_changing_tensor() -> None:
    array = numpy.zeros(4 << 20, "f4")

    class Changing(io.BytesIO):
        def write(self, data: Any, /) -> int:
            array[-1] = 1
            return super().write(data)

    memory = Changing()
    ingot.numpy.save_file({"a": array}, memory, checksums=True)
    with raises(ingot.IntegrityError, code="digest-mismatch"):
        ingot.numpy.load_file(io.BytesIO(memory.getvalue()), verify=True)


def test_save_file_to_a_stream_reports_progress(capfd: pytest.CaptureFixture[str]) -> None:
    told = Progress()
    memory = io.BytesIO()
    ingot.numpy.save_file(ARRAYS, memory, progress=told)
    nbytes = len(memory.getvalue())
    told.assert_complete(nbytes)

    memory = io.BytesIO()
    with pytest.raises(Stopped):
        ingot.numpy.save_file(ARRAYS, memory, progress=stop)
    assert len(memory.getvalue()) <= 4 << 20
    with pytest.raises(TypeError, match="progress must be"):
        ingot.numpy.save_file(ARRAYS, memory, progress="yes")  # type: ignore[arg-type]
    ingot.numpy.save_file(ARRAYS, io.BytesIO(), progress=True)
    assert "Saving BytesIO" in capfd.readouterr().err


GIVEN: dict[str, Any] = {
    "overwrite": {"overwrite": False},
    "durable": {"durable": False},
    "atomic": {"atomic": False},
    "background": {"background": True},
    "replace_read_only": {"write_options": {"replace_read_only": True}},
    "snapshot": {"write_options": {"snapshot": False}},
}


@pytest.mark.parametrize("name", GIVEN)
def test_save_file_to_a_stream_rejects_file_options(name: str) -> None:
    memory = io.BytesIO()
    with raises(ingot.OptionError, rf"^{name}: .*found an object with a write: BytesIO", code="needs-a-name"):
        ingot.numpy.save_file(ARRAYS, memory, **GIVEN[name])
    assert memory.getvalue() == b""


def test_save_file_to_a_stream_takes_or_rejects_every_option() -> None:
    kept = {"metadata", "format", "progress", "reserve_header", "align", "checksums", "storage_options"}
    assert set(Saving._fields) == kept | GIVEN.keys()
    with pytest.raises(ingot.OptionError, match=r"^durable, replace_read_only, background: "):
        ingot.numpy.save_file(
            {}, io.BytesIO(), durable=True, write_options={"replace_read_only": True}, background=True
        )  # type: ignore[call-overload]


def test_save_file_passes_on_the_error_of_a_stream() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        ingot.numpy.save_file(ARRAYS, Full())
    with pytest.raises(io.UnsupportedOperation), open(os.devnull, "rb") as reading:
        ingot.numpy.save_file(ARRAYS, reading)
    closed = io.BytesIO()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        ingot.numpy.save_file(ARRAYS, closed)


@pytest.mark.parametrize(
    ("count", "kind", "said"),
    [
        (0, ingot.StorageError, "Dribble: write took 0 of"),
        (-1, ingot.StorageError, "Dribble: write took -1 of"),
        (10**9, ingot.StorageError, "Dribble: write took 1000000000 of"),
        (None, BlockingIOError, "does not block and is full"),
    ],
)
def test_save_file_rejects_an_impossible_result_of_write(
    count: Any, kind: type[Exception], said: str
) -> None:
    stubborn: Any = Dribble(1)
    stubborn.write = lambda data: count
    with pytest.raises(kind, match=said):
        ingot.numpy.save_file(ARRAYS, stubborn)


TEXTS: dict[str, Callable[[Path], Any]] = {
    "model.txt": lambda path: open(path / "model.txt", "w"),  # noqa: SIM115
    "StringIO": lambda path: io.StringIO(),
    "wrapped": lambda path: tempfile.NamedTemporaryFile("w", dir=path, prefix="wrapped"),  # noqa: SIM115
    "encoded": lambda path: codecs.open(str(path / "encoded"), "w", "utf-8"),  # noqa: SIM115
}


@pytest.mark.parametrize("name", TEXTS)
def test_save_file_rejects_a_text_file(tmp_path: Path, name: str) -> None:
    with (
        TEXTS[name](tmp_path) as text,
        pytest.raises(TypeError, match=f"the text file `.*{name}.*`: open it"),
    ):
        ingot.numpy.save_file(ARRAYS, text)


def test_save_file_rejects_a_value_without_write() -> None:
    for nothing in (object(), None, 5):
        with pytest.raises(TypeError, match="expected a path"):
            ingot.numpy.save_file(ARRAYS, nothing)  # type: ignore[call-overload]


def test_save_file_writes_nothing_to_a_stream_if_a_tensor_fails() -> None:
    memory = io.BytesIO()
    with pytest.raises(ValueError, match="`b`"):
        ingot.torch.save_file({"a": torch.zeros(1), "b": [1.0]}, memory)  # type: ignore[dict-item]
    with pytest.raises(ingot.SaveError):
        ingot.numpy.save_file({"__metadata__": numpy.zeros(1)}, memory)
    with pytest.raises(ingot.OptionError, match="align"):
        ingot.numpy.save_file({}, memory, write_options={"align": 7})  # type: ignore[call-overload]
    assert memory.getvalue() == b""


def test_save_file_to_a_stream_takes_one_piece_of_memory(tmp_path: Path) -> None:
    program = """
import ingot.numpy, numpy
array = numpy.ones(64 << 20, "f4").reshape(1 << 13, 1 << 13).T
class Nowhere:
    def write(self, data):
        return len(data)
nowhere = Nowhere()
ingot.numpy.save_file({"warm": numpy.ones((3 << 10, 1 << 10), "f4").T}, nowhere, checksums=True)
forget_peak()
before = memory("VmRSS")
ingot.numpy.save_file({"a": array}, nowhere, checksums=True)
say(memory("VmHWM") - before)
"""
    assert run(program).said() < 48 << 20


def test_stream_protocol_is_known_to_checkers() -> None:
    def takes(file: Writable) -> object:
        return file.write(b"")

    assert takes(io.BytesIO()) == 0
