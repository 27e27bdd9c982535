"""One rule for `progress`: every function takes a bool, None or a callable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.doors import parameters, public_functions

DOORS = {name: call for name, call in public_functions().items() if "progress" in parameters(call)}
ONES = {"a": np.ones(1000, np.float32)}
BYTES = {"a": {"dtype": "F32", "shape": [1000], "data": bytes(4000)}}

# Calls with `progress`, by function: of a file and of a new path.
GIVEN: dict[str, Callable[[Path, Path], tuple[Any, ...]]] = {
    "cast": lambda file, new: (file, new, "F16"),
    "check": lambda file, new: (file,),
    "convert": lambda file, new: (file, new),
    "diff": lambda file, new: (file, file),
    "stats": lambda file, new: (file,),
    "download": lambda file, new: ("https://localhost:1/a.safetensors", new),
    "hash": lambda file, new: (file,),
    "load_file": lambda file, new: (file,),
    "load_state": lambda file, new: (file,),
    "load_into": lambda file, new: ({}, file),
    "load_model": lambda file, new: (None, file),
    "merge": lambda file, new: ([file], new),
    "repair": lambda file, new: (file, new),
    "replace_tensor": lambda file, new: (file, "a", ONES["a"]),
    "rewrite": lambda file, new: (file, new),
    "ingot.numpy.save_file": lambda file, new: (ONES, new),
    "save_file": lambda file, new: ({}, new),
    "save_state": lambda file, new: (ONES, new),
    "serialize_file": lambda file, new: (BYTES, new),
    "split": lambda file, new: (file, new),
    "update_metadata": lambda file, new: (file, {"k": "v" * 600}),
    "upload": lambda file, new: (file, "s3://bucket/a.safetensors"),
    "verify": lambda file, new: (file,),
}
# Without these, no tensor is read.
MORE = {"check": {"values": True}, "diff": {"values": True}}
# The functions that need only NumPy, and no network.
NEAR = [
    name
    for name in DOORS
    if name.rpartition(".")[0] in ("ingot", "ingot.numpy") and name not in ("ingot.download", "ingot.upload")
]


def call(name: str, file: Path, new: Path, progress: Any) -> None:
    more = MORE.get(name.removeprefix("ingot."), {})
    DOORS[name](*given(name, file, new), progress=progress, **more)


def given(name: str, file: Path, new: Path) -> tuple[Any, ...]:
    return GIVEN[name if name in GIVEN else name.rpartition(".")[2]](file, new)


@pytest.mark.parametrize("progress", [True, False, None])
@pytest.mark.parametrize("name", NEAR)
def test_progress_shows_a_bar_or_nothing(
    name: str, progress: bool | None, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ingot.numpy.save_state(ONES, path, checksums=True)
    call(name, path, path.with_name("new.safetensors"), progress)
    assert bool(capsys.readouterr().err) == (progress is True)


@pytest.mark.parametrize("name", NEAR)
def test_progress_receives_done_and_total_bytes(name: str, path: Path) -> None:
    ingot.numpy.save_state(ONES, path, checksums=True)
    told: list[tuple[int, int]] = []
    call(name, path, path.with_name("new.safetensors"), lambda *now: told.append(now))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] >= 4000


@pytest.mark.parametrize("algorithm", ["blake3", "autov3", "md5"])
@pytest.mark.parametrize("progress", [True, False, None, lambda done, total: None])
def test_hash_reports_progress_for_every_algorithm(algorithm: str, progress: Any, path: Path) -> None:
    ingot.numpy.save_file(ONES, path)
    assert ingot.hash(path, algorithm, progress=progress) == ingot.hash(path, algorithm)
