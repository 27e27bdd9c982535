"""Cuts of the power while patches are applied in place, and while they are written."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import numpy
from cuts import Cut, CutVolatile
from faults import MODEL, PATCH, differing, restore, tree

import ingot
import ingot.delta
import ingot.numpy
from support.file_operations import Names
from support.power_loss import Outcome

STEPS = 3
COMMITTED = "committed-"


def version(number: int) -> dict[str, numpy.ndarray]:
    """Return many tensors, whose header takes several sectors. The first and the last differ by version."""
    tensors = {f"layer {at:02}": numpy.zeros(1500) for at in range(24)}
    for name in ("layer 00", "layer 23"):
        tensors[name][7] = number
    return tensors


def make_patch(path: str, checksums: str | None) -> None:
    """Save the base at `path`, as a file or as shards, and the patch."""
    for number, file in enumerate((MODEL, "new.safetensors")):
        ingot.numpy.save_file(version(number), file, checksums=checksums)
    if path == MODEL:
        ingot.delta.diff(MODEL, "new.safetensors", PATCH, overwrite=True)
    else:
        for file, folder in ((MODEL, path), ("new.safetensors", "new")):
            ingot.split(file, folder, 100_000, overwrite=True)
        ingot.delta.diff(path, "new", PATCH, overwrite=True)
        shutil.rmtree("new")
    os.remove("new.safetensors")


class CutInPlace(Cut):
    """Apply a patch in place. Files that are neither old nor new are refused, until the next call."""

    def __init__(self, name: str, path: str = MODEL, checksums: str | None = None) -> None:
        make_patch(path, checksums)
        self.path = path
        self.versions = [{name: array.tobytes() for name, array in version(n).items()} for n in (0, 1)]
        super().__init__(name, write=lambda: ingot.delta.apply(path, PATCH, in_place=True))

    def judge_files(self, outcome: Outcome) -> None:
        restore(outcome.files)
        found = self.loaded()
        if found != self.versions[1] and (outcome.returned or found not in (None, self.versions[0])):
            self.note(str(outcome), "a reader finds what is neither old nor new")
        try:
            ingot.delta.apply(self.path, PATCH, in_place=True, threads=1, durable=False)
        except (ingot.SafetensorError, OSError) as error:
            self.note(str(outcome), f"the next call fails: {error}")
        else:
            if tree() != self.after:
                self.note(str(outcome), f"the next call: {differing(tree(), self.after)}")
        restore(self.before)

    def loaded(self) -> dict[str, bytes] | None:
        """Return the tensors, or None if they are refused."""
        try:
            found = ingot.numpy.load_file(self.path)
        except (ingot.SafetensorError, OSError):
            return None
        return {name: array.tobytes() for name, array in found.items()}


class CutVolatileInPlace(CutVolatile):
    """Apply a patch in place to a file with digests, without waiting for the disk."""

    def __init__(self, name: str) -> None:
        make_patch(MODEL, "xxh3")
        super().__init__(name, lambda: ingot.delta.apply(MODEL, PATCH, in_place=True, durable=False))


class CutDeltaWriter(Cut):
    """Write a version and its patches. After a cut, a server gets all steps that were committed."""

    def __init__(self, name: str) -> None:
        # Import torch before the forks.
        importlib.import_module("ingot.torch")
        super().__init__(name, write=write_steps)

    def values(self) -> int | str:
        """Return the number of steps that a server gets."""
        files = sorted(Path("weights").glob("*-????????.safetensors"), key=lambda path: path.stem[-8:])
        for step, path in enumerate(files):
            if path.name != f"{'patch' if step else 'whole'}-{step:08}.safetensors":
                return f"{path.name} is step {step}"
            if step:
                ingot.delta.apply("server.safetensors", path, in_place=True, threads=1, durable=False)
            else:
                shutil.copy(path, "server.safetensors")
            found = ingot.numpy.load_file("server.safetensors")
            if any((found[name] != array).any() for name, array in version(step).items()):
                return f"step {step} has other values"
        Path("server.safetensors").unlink(missing_ok=True)
        return len(files)

    def judge_files(self, outcome: Outcome) -> None:
        restore(outcome.files)
        try:
            found = self.values()
        except (ingot.SafetensorError, OSError) as error:
            found = str(error)
        begun = self.recording.operations[: outcome.begun]
        committed = sum(one.changes[0][1].startswith(COMMITTED) for one in begun if isinstance(one, Names))
        if found not in range(committed, STEPS + 1):
            self.note(str(outcome), f"after {committed} steps: {found}")
        restore(self.before)


def write_steps() -> None:
    """Write all steps, and make a directory after each commit, which the recorder sees."""
    import torch

    from ingot.torch import DeltaWriter

    tensors: dict[str, torch.Tensor] = {}
    with DeltaWriter(tensors, "weights") as writer:
        for step in range(STEPS):
            tensors.update({name: torch.from_numpy(array) for name, array in version(step).items()})
            writer.save(step)
            writer.commit()
            os.mkdir(f"{COMMITTED}{step}")
