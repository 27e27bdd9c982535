"""Saves on a file system with room for two and a half files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

import ingot
import ingot.numpy
from support.small_disk import small_disk

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A directory of 100 MiB."""
    with small_disk(tmp_path / "small", 100) as place:
        yield place


def test_save_file_replaces_again_and_again_where_two_files_have_room(small: Path) -> None:
    path = small / "model.safetensors"
    # The blocks of a replaced file are freed in the background, and the next save needs them at once.
    for step in range(40):
        ingot.numpy.save_file({"t": numpy.full(40 * MIB, step, "u1")}, path)
    assert (safetensors.numpy.load_file(path)["t"] == 39).all()
    for step in range(10):
        assert ingot.update_metadata(path, {"step": str(step)}, atomic=True) == "rewritten"
    for step in range(10):
        ingot.numpy.save_file({"t": numpy.full(30 * MIB, step, "u1")}, path, atomic=False)
    assert (safetensors.numpy.load_file(path)["t"] == 9).all()
    assert [file.name for file in small.iterdir()] == ["model.safetensors"]
