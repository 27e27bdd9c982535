"""Tensors without memory: no way to save them crashes, writes a wrong file or loses a tensor."""

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
    """Fails without the checks `_without_memory` and `lies_within`: then many are saved, and some crash."""
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
    # Like upstream, these reject a storage that no tensor covers, and tensors that are not in C order.
    parts = {
        (way, "SharedMemoryError of broken shared-memory") for way in ("model", "sharded", "sharded-once")
    }
    steps = {(way, "SaveError of broken not-contiguous") for way in ("upstream-save", "upstream-save-file")}
    assert refused == parts | steps
