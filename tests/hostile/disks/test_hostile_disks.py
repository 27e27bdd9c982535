"""Kills at any moment, full disks and missing permissions."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.hostile_files import ARRAY
from support.processes import run
from support.small_disk import small_disk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "in place"])
@pytest.mark.parametrize("durable", [True, False])
def test_save_file_keeps_the_old_file_on_a_full_disk(
    small_disk: Path, options: dict[str, Any], durable: bool
) -> None:
    path = small_disk / "model.safetensors"
    ingot.numpy.save_file({"a": ARRAY}, path)
    before = path.read_bytes()
    with pytest.raises(ingot.StorageError) as caught:
        ingot.numpy.save_file({"a": numpy.ones(8 << 20, numpy.uint8)}, path, durable=durable, **options)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert str(path) in str(caught.value)
    # The needed bytes, with the header.
    assert str((8 << 20) + 80) in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(small_disk) == [path.name]
    # Repeated saves of 1 MiB fit, since each frees the file before it.
    for _ in range(8):
        ingot.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, path, durable=durable)


def assert_names(fault: OSError, path: Path) -> None:
    """Check that the error names `path`, and no temporary file."""
    assert os.fspath(path) in str(fault)
    assert fault.filename == os.fspath(path)
    assert fault.filename2 is None
    assert ".ingot-" not in f"{fault} {fault.args} {vars(fault)}"


def save_sharded(arrays: dict[str, Any], folder: Path) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ingot.torch.save_sharded(tensors, folder, max_shard_size=2000, overwrite=True)


def test_writers_name_a_path_that_is_taken(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    ingot.numpy.save_file({"a": ARRAY}, source)
    (tmp_path / "model.safetensors").mkdir()
    for make in (
        lambda: ingot.split(source, tmp_path, overwrite=True),
        lambda: save_sharded({"a": ARRAY}, tmp_path),
        lambda: ingot.convert(source, tmp_path / "", format="safetensors", overwrite=True),
    ):
        with pytest.raises(IsADirectoryError) as caught:
            make()
        assert_names(caught.value, tmp_path / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "source.safetensors"]


# Without extents, ext4 cannot reserve space for a file. Then the writes themselves fail on a full disk.
@pytest.fixture(params=[[], ["-O", "^extent,^64bit"]], ids=["reserved", "written"])
def disk_of_96_mib(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount an ext4 file system of 96 MiB, which supports writes that bypass the page cache."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root may mount a file system, and only mkfs.ext4 makes one")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    made = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", *request.param, image]
    subprocess.run(made, check=True, capture_output=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", image, disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    (disk / "lost+found").rmdir()
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("durable", [True, False])
def test_save_file_keeps_a_large_old_file_on_a_full_disk(
    disk_of_96_mib: Path, durable: bool, background: bool
) -> None:
    path = disk_of_96_mib / "model.safetensors"

    def save(nbytes: int) -> None:
        arrays = {"a": numpy.full(nbytes, nbytes % 251, numpy.uint8)}
        saved = ingot.numpy.save_file(arrays, path, durable=durable, background=background)
        if saved is not None:
            saved.result()

    save(40 << 20)
    before = path.read_bytes()
    for nbytes in (64 << 20, 90 << 20, 200 << 20):
        with pytest.raises(ingot.StorageError) as caught:
            save(nbytes)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert str(nbytes + 80) in str(caught.value), "what is needed, with the header"
        assert path.read_bytes() == before
        assert os.listdir(disk_of_96_mib) == [path.name]
    # Repeated saves of one size fit, since each frees the file before it.
    for _ in range(4):
        save(40 << 20)
    assert path.read_bytes() == before


FORBIDDEN = """
become_nobody()
ok = numpy.ones(3)
found = []
for options in ({}, {"atomic": False}):
    for name in ("new", "old"):
        try:
            ingot.numpy.save_file({"a": ok}, name, **options)
            found.append("saved")
        except OSError as fault:
            found.append([type(fault).__name__, fault.errno, fault.filename, "atomic=False" in str(fault)])
say([found, sorted(os.listdir()), ingot.numpy.load_file("old")["a"].tolist()])
"""


def test_save_file_explains_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(ingot.numpy.save({"a": ARRAY}))
    (tmp_path / "old").chmod(0o666)
    tmp_path.chmod(0o555)
    try:
        found, names, array = run(FORBIDDEN, folder=tmp_path).said()
    finally:
        tmp_path.chmod(0o755)
    # The advice to write in place is only for an existing file.
    refused = [["PermissionError", errno.EACCES, name, name == "old"] for name in ("new", "old")]
    assert found == [*refused, ["PermissionError", errno.EACCES, "new", False], "saved"]
    assert names == ["old"]
    assert array == [1, 1, 1]


def test_save_file_reports_a_removed_directory(tmp_path: Path) -> None:
    program = """
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
try:
    ingot.numpy.save_file({"a": numpy.ones(3)}, "t")
except OSError as fault:
    say([type(fault).__name__, fault.errno])
"""
    assert run(program, folder=tmp_path).said() == ["FileNotFoundError", errno.ENOENT]


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk(tmp_path / "disk", 4) as disk:
        yield disk
