"""Fixtures of the tests of devices: two GPUs, and a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ingot._base import frameworks

from .simulator import Gpus


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made = Gpus(tmp_path, devices=2)
    monkeypatch.setitem(frameworks.FRAMEWORKS, "simulated", "simulated")
    monkeypatch.setitem(sys.modules, "ingot.simulated", made.module())
    yield made
    made.release()
    counted = made.counted()
    assert counted["pinned"] == 0 or made.is_lost
    for wrong in ("without_context", "forked", "captured", "overlapping", "stray", "deadlocks"):
        assert counted[wrong] == 0, wrong


@pytest.fixture
def framework(gpus: Gpus) -> ModuleType:
    return sys.modules["ingot.simulated"]
