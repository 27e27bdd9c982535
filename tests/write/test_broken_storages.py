"""Tensors whose memory is gone, or never was: no way of saving makes a file of them, crashes or loses one."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("broken_storages.py")

# The error of an unmodified program with upstream's names.
REFUSED = (
    "SaveError of broken no-values",
    # Under compat, the error for a meta tensor is a `NotImplementedError` too.
    "NoValuesError of broken no-values",
    "DestinationError of broken destination",
)


@cache
def outcomes() -> dict[tuple[str, str], str | None]:
    """Return the result of each kind of tensor in each way, or None if the process crashed."""
    # torch warns about its own imports and views.
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    found = {(kind, way): said for kind, way, said in lines}
    crashed = [pair for pair, said in found.items() if said is None]
    assert ended.returncode == 0, f"{ended.returncode} in {crashed}\n{ended.stderr}"
    return found


def test_save_of_broken_storages_never_crashes() -> None:
    assert None not in outcomes().values()


def test_save_of_broken_storages_names_the_tensor_and_changes_no_file() -> None:
    """Tried: without `_without_memory` and without `lies_within`, many of these are saved, and some crash."""
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        from broken_storages import BROKEN, WHOLE
    finally:
        sys.path.remove(str(PROGRAM.parent))
    tried = {kind for kind, _ in outcomes()}
    assert tried == BROKEN.keys() | WHOLE.keys()
    wrong = {pair: said for pair, said in outcomes().items() if pair[0] in BROKEN and said not in REFUSED}
    assert wrong == {}
    refused = {(pair[1], said) for pair, said in outcomes().items() if pair[0] in WHOLE and said != "saved"}
    # As upstream: for a storage that no name holds whole, and for tensors not in C order.
    parts = {
        (way, "SharedMemoryError of broken shared-memory") for way in ("model", "sharded", "sharded-once")
    }
    steps = {(way, "SaveError of broken not-contiguous") for way in ("upstream-save", "upstream-save-file")}
    assert refused == parts | steps
