"""Objects that a file can be read from: open files, buffers, fsspec's files, the files of a store."""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import obstore.store

import ingot

NAME = "model.safetensors"


class Counting:
    """A store of obstore that records the ranges that are requested."""

    def __init__(self, data: bytes) -> None:
        self.asked: list[tuple[int, int]] = []
        self.heads = 0
        self.store = obstore.store.MemoryStore()
        self.store.put(NAME, data)

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[Any]:
        self.asked += zip(starts, ends, strict=True)
        return list(self.store.get_ranges(path, starts=starts, ends=ends))

    def head(self, path: str) -> Any:
        self.heads += 1
        return self.store.head(path)


def in_memory_of_fsspec(data: bytes) -> str:
    fsspec.filesystem("memory").pipe_file(f"/ingot-tests/{NAME}", data)
    return f"memory://ingot-tests/{NAME}"


def written(data: bytes, folder: Path) -> Path:
    path = folder / NAME
    path.write_bytes(data)
    return path


def opened(data: bytes, folder: Path) -> Any:
    return written(data, folder).open("rb")


def member(data: bytes, compression: int) -> Any:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        archive.writestr(NAME, data)
    return zipfile.ZipFile(packed).open(NAME)


def mapped(data: bytes) -> mmap.mmap:
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return pages


def in_obstore(data: bytes) -> Any:
    store = obstore.store.MemoryStore()
    store.put(NAME, data)
    return store


class Dribbling(io.BytesIO):
    """A file that returns few bytes at a time, as raw files may."""

    getbuffer = None  # type: ignore[assignment]

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size if size is None else min(size, 70_001))


OBJECTS: dict[str, Callable[[bytes, Path], Any]] = {
    "BytesIO": lambda data, folder: io.BytesIO(data),
    "bytearray": lambda data, folder: bytearray(data),
    "memoryview": lambda data, folder: memoryview(data),
    "mmap": lambda data, folder: mapped(data),
    "open file": opened,
    "raw file": lambda data, folder: opened(data, folder).detach(),
    "file that dribbles": lambda data, folder: Dribbling(data),
    "stored zip member": lambda data, folder: member(data, zipfile.ZIP_STORED),
    "deflated zip member": lambda data, folder: member(data, zipfile.ZIP_DEFLATED),
    "fsspec": lambda data, folder: fsspec.open(in_memory_of_fsspec(data)),
    "opened fsspec": lambda data, folder: fsspec.open(in_memory_of_fsspec(data)).open(),
    "local fsspec": lambda data, folder: fsspec.open(str(written(data, folder))),
    "opened local fsspec": lambda data, folder: fsspec.open(str(written(data, folder))).open(),
    "file system of fsspec": lambda data, folder: ingot.Ranges(
        fsspec.filesystem("memory"), in_memory_of_fsspec(data)
    ),
    "obstore": lambda data, folder: ingot.Ranges(in_obstore(data), NAME),
    "obstore, size given": lambda data, folder: ingot.Ranges(in_obstore(data), NAME, nbytes=len(data)),
    "reader of obstore": lambda data, folder: obstore.open_reader(in_obstore(data), NAME),
    "store of one's own": lambda data, folder: ingot.Ranges(Counting(data), NAME),
}
