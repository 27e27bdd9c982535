"""Four readers load beside a writer that replaces: each load returns one whole version, and no older one.

``INGOT_REPLACEMENTS`` is the number of replacements; ten loads are made for each.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import ingot
from ingot.torch import load_file, load_into, load_state, save_sharded, save_state
from support.ranks import _context
from support.record import note

REPLACEMENTS = int(os.environ.get("INGOT_REPLACEMENTS", "30"))
READERS = 4
LOADS = 10 * REPLACEMENTS // READERS
SHAPES = {"large": (300, 50), "small": (3,), "scalar": (), "empty": (0, 4)}
#: Several files, with names and sizes that differ between versions.
SIZES = (1 << 10, 40_000, 1 << 20)


def state(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def replace(folder: Path, version: int, checkpoints: ingot.Checkpoints) -> None:
    save_sharded(state(version), folder / "shards", SIZES[version % 3], overwrite=True)
    save_state({"model": state(version), "step": version}, folder / "state.safetensors")
    # Each step is deleted when the next one is there.
    checkpoints.save(version, {"model": state(version), "step": version})


def filled(folder: Path) -> dict[str, torch.Tensor]:
    found = state(-1)
    load_into(found, folder / "shards")
    return found


def tensors_of(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    assert float(found["model"]["scalar"]) == found["step"]
    return dict(found["model"])


def step_filled(folder: Path) -> dict[str, torch.Tensor]:
    return tensors_of(ingot.Checkpoints(folder / "run").load(into={"model": state(-1), "step": 0}))


LOADERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "load_file": lambda folder: load_file(folder / "shards"),
    "load_into": filled,
    "load_state": lambda folder: tensors_of(load_state(folder / "state.safetensors")),
    "load": lambda folder: tensors_of(ingot.Checkpoints(folder / "run").load()),
    "load(into=)": step_filled,
}


def read(folder: Path, results: Any) -> None:
    """Load by each function in turn, and report a fault or the number of versions that were met."""
    os.environ["INGOT_DURABLE"] = "0"
    torch.set_num_threads(1)
    last = dict.fromkeys(LOADERS, 0.0)
    versions: set[float] = set()
    try:
        for turn in range(LOADS):
            name = [*LOADERS][turn % len(LOADERS)]
            found = LOADERS[name](folder)
            values = {float(value) for tensor in found.values() for value in tensor.flatten()}
            assert {key: tuple(one.shape) for key, one in found.items()} == SHAPES, f"{name}: other tensors"
            assert len(values) == 1, f"{name}: mixed: {sorted(values)}"
            assert min(values) >= last[name], f"{name}: {min(values)} after {last[name]}"
            last[name] = min(values)
            versions |= values
        results.send(("ok", len(versions)))
    except BaseException:
        results.send(("fault", traceback.format_exc()))


def test_readers_load_whole_versions_beside_replacements(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("INGOT_DURABLE", "0")
    pipes, processes, reports = [], [], []
    with ingot.Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        replace(tmp_path, 1, checkpoints)
        checkpoints.wait()
        for _ in range(READERS):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=read, args=(tmp_path, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        version, left = 1, [*pipes]
        # Until all have ended, so that no load is beside an idle writer.
        while left:
            version += 1
            replace(tmp_path, version, checkpoints)
            done: list[Any] = wait(left, timeout=0)
            reports += [pipe.recv() for pipe in done]
            left = [pipe for pipe in left if pipe not in done]
    for process in processes:
        process.join()
    assert [one for one in reports if one[0] == "fault"] == []
    note("loads beside replacements", READERS * LOADS, 0, replacements=version, versions=reports[0][1])
