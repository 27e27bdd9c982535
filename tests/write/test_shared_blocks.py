"""Edits on a file system where files can share blocks: right to the byte, and without taking space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import safetensors
import safetensors.numpy

import ingot
import ingot.numpy

MKFS = shutil.which("mkfs.xfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
# As XFS wants it, with room for a copy: it is not for want of space that nothing is copied.
IMAGE_NBYTES = 600 << 20

# 100 MiB and some, so that it takes several calls, of tensors that do not end where pages do.
ARRAYS = {
    "odd": numpy.arange(3, dtype="u1"),
    "large": numpy.arange(70 << 18, dtype="<u4"),
    "small": numpy.arange(1001, dtype="<u2"),
    "last": numpy.arange((33 << 18) + 5, dtype="<u4"),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


@pytest.fixture(scope="module")
def xfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if MKFS is None or os.geteuid() != 0:
        pytest.skip("making XFS takes root and xfsprogs")
    folder = tmp_path_factory.mktemp("xfs")
    image, place = folder / "image", folder / "mount"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_NBYTES)
    subprocess.run([MKFS, "-q", "-m", "reflink=1", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"XFS cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        image.unlink()


@pytest.fixture
def path(xfs: Path) -> Iterator[Path]:
    path = xfs / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    yield path
    for file in xfs.iterdir():
        file.unlink()


def used(path: Path) -> int:
    """Bytes of the file system that are taken."""
    os.sync()
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def same(path: Path, arrays: dict[str, numpy.ndarray]) -> None:
    found = safetensors.numpy.load_file(path)
    assert found.keys() == arrays.keys()
    assert all((found[name] == arrays[name]).all() for name in arrays)


@pytest.mark.parametrize("durable", [True, False])
def test_metadata_without_room_shares_the_data_with_the_old_file(path: Path, durable: bool) -> None:
    before = used(path)
    # Who has the old file open keeps its blocks, so that those of the new one are counted beside them.
    with path.open("rb"):
        text = "long" * 10_000
        assert ingot.update_metadata(path, set={"note": text}, durable=durable) == "rewritten"
        assert used(path) - before < 2 << 20
    same(path, ARRAYS)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"note": text}


def test_a_tensor_is_replaced_and_the_others_are_shared(path: Path) -> None:
    before = used(path)
    new = ARRAYS["small"][::-1]
    with path.open("rb"):
        ingot.replace_tensor(path, "small", new)
        assert used(path) - before < 4 << 20
    same(path, {**ARRAYS, "small": new})


def test_what_moves_by_less_than_a_block_is_copied(path: Path) -> None:
    before = used(path)
    out = path.with_name("out.safetensors")
    ingot.rewrite(path, out, drop=["odd"], rename={"large": "renamed"})
    kept = {"renamed" if name == "large" else name: array for name, array in ARRAYS.items() if name != "odd"}
    same(out, kept)
    assert used(path) - before >= NBYTES - 8
    with path.open("rb") as old, out.open("rb") as new:
        at_in_page = [len(file.read()) % 4096 for file in (old, new)]
    assert at_in_page[0] != at_in_page[1]


def test_whoever_stops_it_finds_the_old_file(path: Path) -> None:
    before = path.read_bytes()

    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        ingot.rewrite(path, path, rename={"large": "renamed"}, progress=stop, overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
