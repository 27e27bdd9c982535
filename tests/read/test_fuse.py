"""Files on a FUSE mount: the sizes of requests, and errors for unreadable blocks."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.slow_disk import missing, mounted

if lacked := missing():
    pytest.skip(f"no FUSE mount: {lacked}", allow_module_level=True)

ARRAYS = {
    "first": numpy.arange(5000, dtype=numpy.float32),
    "large": numpy.arange(3 << 20, dtype=numpy.uint32),
    "small": numpy.ones((3, 4), numpy.float16),
}


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    folder = tmp_path / "shown"
    folder.mkdir()
    ingot.numpy.save_file(ARRAYS, folder / "model.safetensors")
    return folder


def same(found: dict[str, numpy.ndarray]) -> None:
    assert found.keys() == ARRAYS.keys()
    assert all((found[name] == ARRAYS[name]).all() for name in ARRAYS)


def test_load_file_reads_a_fuse_mount_without_mapping(shown: Path, tmp_path: Path) -> None:
    with mounted(shown, tmp_path / "mount"):
        path = tmp_path / "mount" / "model.safetensors"
        with ingot.safe_open(path, "np") as file:
            assert (file.backend, file.why) == ("pread", "FUSE is slow to map")
            same(file.get_tensors())
            assert (file.get_slice("large")[5:7] == ARRAYS["large"][5:7]).all()
        same(ingot.numpy.load_file(path))
        same(ingot.numpy.load_file(path, backend="mmap"))


def test_load_file_reads_a_fuse_mount_in_large_requests(shown: Path, tmp_path: Path) -> None:
    """By default the kernel requests 128 KiB at once, and pays the latency of the mount for each."""
    path, log = tmp_path / "mount" / "model.safetensors", tmp_path / "log"
    with mounted(shown, path.parent, log=log):
        with ingot.safe_open(path, "np") as file:
            opened = log.read_text()
            assert file.get_slice("large")[2 << 20 : (2 << 20) + 2].tolist() == [2 << 20, (2 << 20) + 1]
        asked = [int(line) for line in log.read_text().removeprefix(opened).split()]
        assert sum(asked) <= 2 * os.sysconf("SC_PAGE_SIZE")
        same(ingot.numpy.load_file(path))
    assert max(map(int, log.read_text().split())) > 128 << 10


def test_load_file_names_an_unreadable_block(shown: Path, tmp_path: Path) -> None:
    stored = shown / "model.safetensors"
    with ingot.safe_open(stored, "np") as file:
        info = file.info("large")
    data_start = stored.stat().st_size - sum(array.nbytes for array in ARRAYS.values())
    broken = data_start + info.begin + (5 << 20)
    with mounted(shown, tmp_path / "mount", broken=broken):
        path = tmp_path / "mount" / "model.safetensors"
        with pytest.raises(ingot.StorageError, match="tensor `large`") as caught:
            ingot.numpy.load_file(path)
        failure = caught.value
        assert (failure.errno, failure.path, failure.tensor) == (errno.EIO, str(path), "large")
        assert failure.begin <= broken < failure.end
        assert str(path) in str(failure)
        with pytest.raises(ingot.StorageError, match="tensor `large`"):
            ingot.numpy.load_file(path, slices={"large": numpy.s_[: 2 << 20]}, keys=["large"])
        # Other blocks are readable.
        assert (ingot.numpy.load_file(path, keys=["small"])["small"] == ARRAYS["small"]).all()


# Every way to read the tensor `large`, which has a broken block.
READS: dict[str, Callable[[Path], Any]] = {
    "load_file": ingot.numpy.load_file,
    "load_file in torch": ingot.torch.load_file,
    "load_file of slices": lambda path: ingot.numpy.load_file(path, slices={"large": numpy.s_[::2]}),
    "load_file on one thread": lambda path: ingot.numpy.load_file(path, threads=1),
    "load_file into memory": lambda path: ingot.numpy.load_file(
        path, keys=["large"], out={"large": numpy.empty_like(ARRAYS["large"])}
    ),
    "load_file that verifies": lambda path: ingot.numpy.load_file(path, verify=True),
    "load_into": lambda path: ingot.torch.load_into(
        {"large": torch.empty(3 << 20, dtype=torch.uint32)}, path, strict=False
    ),
    "get_tensors": lambda path: ingot.safe_open(path, "np").get_tensors(["small", "large"]),
    "get_slice": lambda path: ingot.safe_open(path, "np").get_slice("large")[5:],
    "prefetch": lambda path: dict(ingot.safe_open(path, "np").prefetch()),
    "warm": ingot.warm,
}


def held(folder: Path) -> list[str]:
    """Return the files of `folder` that this process has open, and the threads of ingot."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.append(os.readlink(link))
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            targets.append((task / "comm").read_text().strip())
    return [target for target in targets if target.startswith((str(folder), "ingot"))]


@pytest.mark.parametrize("way", READS)
def test_load_file_releases_the_file_after_an_unreadable_block(shown: Path, tmp_path: Path, way: str) -> None:
    stored = shown / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, stored, checksums=True)
    with ingot.safe_open(stored, "np") as file:
        broken = stored.stat().st_size - sum(array.nbytes for array in ARRAYS.values())
        broken += file.info("large").begin + (5 << 20)
    with mounted(shown, tmp_path / "mount", broken=broken):
        path = tmp_path / "mount" / "model.safetensors"
        for _ in range(3):
            with pytest.raises(ingot.StorageError, match="tensor `large`") as caught:
                READS[way](path)
            assert (caught.value.errno, caught.value.path) == (errno.EIO, str(path))
            # The traceback keeps the objects of its frames alive.
            del caught
        for _ in range(1200):
            if not held(tmp_path):
                break
            time.sleep(0.05)
        assert held(tmp_path) == []


def test_load_file_reports_a_lost_mount_without_a_signal(shown: Path, tmp_path: Path) -> None:
    with mounted(shown, tmp_path / "mount") as server:
        file = ingot.safe_open(tmp_path / "mount" / "model.safetensors", "np")
        server.kill()
        server.wait()
        with pytest.raises(ingot.StorageError) as caught:
            file.get_tensor("large")
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
