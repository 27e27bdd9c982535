"""Tensors larger than a system call can copy: 2 GiB less a page on Linux, 2 GiB elsewhere.

The files are sparse, except for marks: bytes on both sides of the limits of a call and of 32-bit numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest

import ingot
import ingot.numpy
import ingot.torch
from support.sparse_models import write_file

pytestmark = pytest.mark.slow

# The most bytes that Linux reads or writes in one call: MAX_RW_COUNT.
CALL = 0x7FFF_F000
TWO_GIB, FOUR_GIB = 1 << 31, 1 << 32
# Just over 2 GiB, and no multiple of a page or of a word.
NBYTES = TWO_GIB + 4097


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder for sparse files. It is emptied afterwards, since copies may not be sparse."""
    folder = tmp_path_factory.mktemp("large")
    with (folder / "hole").open("wb") as file:
        try:
            file.truncate(2 * FOUR_GIB)
        except OSError:
            pytest.skip("the file system has no files of this size")
    if (folder / "hole").stat().st_blocks > 8:
        pytest.skip("the file system has no sparse files")
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """Return a sparse file with one tensor of just over 2 GiB and its marks. Tests do not change it."""
    return marked_file(folder / "large", NBYTES)


def marks(nbytes: int) -> dict[int, int]:
    """Return the positions of the tensor's nonzero bytes, with their values."""
    edges = (0, CALL, TWO_GIB, FOUR_GIB, nbytes)
    places = sorted({edge + step for edge in edges for step in (-1, 0)})
    return {place: mark for mark, place in enumerate(places, 1) if 0 <= place < nbytes}


def marked_file(path: Path, nbytes: int) -> Path:
    """Write a sparse file with one tensor `a` and its marks."""
    write_file(path, {"a": ("U8", (nbytes,))})
    begin = path.stat().st_size - nbytes
    with path.open("r+b") as file:
        for place, mark in marks(nbytes).items():
            file.seek(begin + place)
            file.write(bytes([mark]))
    return path


def assert_marked(tensor: Any) -> None:
    """Check that the tensor has its marks, and zeros everywhere else."""
    expected = marks(NBYTES)
    assert tensor.shape == (NBYTES,)
    assert {place: int(tensor[place]) for place in expected} == expected
    words = numpy.asarray(tensor)[: NBYTES // 8 * 8].view(numpy.uint64)
    total = sum(mark << place % 8 * 8 for place, mark in expected.items() if place < NBYTES // 8 * 8)
    assert int(words.sum()) == total


def test_load_file_fills_more_than_2_gib(large: Path) -> None:
    array = numpy.empty(NBYTES, numpy.uint8)
    for backend in ("mmap", "pread"):
        array[list(marks(NBYTES))] = 0
        assert ingot.numpy.load_file(large, backend=backend, out={"a": array})["a"] is array
        assert_marked(array)


def test_load_file_allocates_more_than_2_gib(large: Path) -> None:
    assert_marked(ingot.torch.load_file(large, backend="pread")["a"])


def test_get_slice_crosses_every_limit(folder: Path, backend: Literal["mmap", "pread"]) -> None:
    nbytes = FOUR_GIB + 4097
    expected = marks(nbytes)
    with ingot.safe_open(marked_file(folder / "slices", nbytes), "np", backend=backend) as file:
        part = file.get_slice("a")
        for place in expected:
            begin = max(place - 3, 0)
            around = part[begin : min(place + 4, nbytes)].tolist()
            assert around == [expected.get(begin + step, 0) for step in range(len(around))]
        # A step of about the bytes of one call.
        assert part[:: CALL - 1].tolist() == [expected.get(at, 0) for at in range(0, nbytes, CALL - 1)]
        assert part[-1:].tolist() == [expected[nbytes - 1]]


def test_mapping_and_hash_cover_more_than_2_gib(large: Path) -> None:
    view = ingot.numpy.load_file(large, backend="mmap")["a"]
    assert view.shape == (NBYTES,)
    assert {place: int(view[place]) for place in marks(NBYTES)} == marks(NBYTES)
    with large.open("rb") as file:
        assert ingot.hash(large) == hashlib.file_digest(file, "sha256").hexdigest()


def test_rewrite_copies_more_than_2_gib(large: Path, folder: Path) -> None:
    out = folder / "rewritten.bt"
    ingot.rewrite(large, out, rename={"a": "b"})
    with ingot.safe_open(out, "np", backend="mmap") as file:
        assert file.format == "bintensors"
        assert_marked(file.get_tensor("b"))
    out.unlink()


def test_save_file_writes_and_digests_more_than_2_gib(folder: Path) -> None:
    path, array = folder / "saved", numpy.zeros(NBYTES, numpy.uint8)
    for place, mark in marks(NBYTES).items():
        array[place] = mark
    ingot.numpy.save_file({"a": array}, path, checksums="xxh3")
    del array
    # The digest was computed before the bytes were written.
    assert ingot.verify(path)
    with ingot.safe_open(path, "np", backend="mmap") as file:
        assert_marked(file.get_tensor("a"))
    path.unlink()
