"""One process holds the tensors of more files than the system maps."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest

import ingot.numpy
from support.processes import run

LIMIT = Path("/proc/sys/vm/max_map_count")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(LIMIT), reason="the system has no such limit")
def test_load_file_holds_more_files_than_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    ingot.numpy.save_file({"a": numpy.arange(300, dtype="f4")}, path)
    count = int(LIMIT.read_text()) + 1000
    if count > 100_000:
        pytest.skip("the limit is too high to be reached quickly")
    program = """
held = [ingot.numpy.load_file(sys.argv[1])["a"] for _ in range(int(sys.argv[2]))]
with open("/proc/self/maps") as maps:
    say([len(held), int(held[-1].sum()), sum(1 for _ in maps)])
"""
    found, total, mappings = run(program, path, count).said()
    assert (found, total) == (count, 299 * 150)
    # The others are left to allocators and threads.
    assert mappings < count / 2
