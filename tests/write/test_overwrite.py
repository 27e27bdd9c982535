"""No file is replaced without `overwrite=True`, and no read-only file without its own option."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot
import ingot.numpy

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

OLD = b"somebody's only copy"
STATE = {"a": torch.zeros(600), "b": torch.ones(600)}
Write = Callable[..., Any]


def merge(folder: Path, **options: Any) -> Path:
    ingot.merge([folder / "source.safetensors"], folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def rewrite(folder: Path, **options: Any) -> Path:
    ingot.rewrite(folder / "source.safetensors", folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def convert(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def convert_to_npz(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out.npz", **options)
    return folder / "out.npz"


def convert_to_shards(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out", max_shard_size=2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


def split(folder: Path, **options: Any) -> Path:
    ingot.split(folder / "source.safetensors", folder / "out", 2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


def save_sharded(folder: Path, **options: Any) -> Path:
    ingot.torch.save_sharded(STATE, folder / "out", 2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


WRITERS: list[Write] = [merge, rewrite, convert, convert_to_npz, convert_to_shards, split, save_sharded]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ingot.torch.save_file(STATE, tmp_path / "source.safetensors")
    return tmp_path


def place(write: Write, folder: Path) -> Path:
    """Return the writer's file, or its first shard, with contents."""
    there = write(folder)
    whole = sorted(there.parent.glob("model*"))
    assert there.exists()
    for shard in whole:
        shard.unlink()
    there.write_bytes(OLD)
    return there


# The writers with `progress`, which a test uses to act shortly before the end. `save_sharded` works like
# `split`.
MEANWHILE = [(write, True) for write in WRITERS if write is not save_sharded]
# Writers that replace links in Python if the file system has none.
MEANWHILE += [(convert_to_shards, False), (split, False)]


@pytest.mark.parametrize(
    ("write", "links"), MEANWHILE, ids=[f"{write.__name__}-{links}" for write, links in MEANWHILE]
)
def test_overwrite_keeps_a_file_created_meanwhile(
    write: Write, links: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place(write, folder)
    there.unlink()

    def made(done: int, total: int) -> None:
        if done == total and not there.exists():
            there.write_bytes(OLD)

    def unlinked(*given: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", unlinked)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write(folder, progress=made)
    assert there.read_bytes() == OLD
    assert not list(folder.rglob(".*"))
    assert not list(folder.rglob("*.index.json"))


def test_overwrite_is_not_needed_for_a_stream(folder: Path) -> None:
    reading, writing = os.pipe()
    try:
        ingot.rewrite(folder / "source.safetensors", f"/dev/fd/{writing}", format="safetensors")
        assert ingot.numpy.load(os.read(reading, 1 << 16))["b"].tolist() == [1.0] * 600
    finally:
        os.close(reading)
        os.close(writing)
