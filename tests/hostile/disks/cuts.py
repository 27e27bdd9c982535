"""Program that cuts the power in each operation of a writer. It runs as `faults` does, in the same folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from faults import FRESH, MODEL, NEW, Way, differing, restore, tree, without_leftovers

import ingot
import ingot.numpy
from support.file_operations import Recording, recorded
from support.power_loss import Outcome, outcomes

# After one of this many outcomes the next save is tried too, which takes a new process.
TRIED_AGAIN = 40


class Cut(Way):
    """Cut the power in each operation of one writer, and check the files."""

    def __init__(self, name: str, durable: bool = True, write: Callable[[], object] | None = None) -> None:
        super().__init__(name, durable, write)
        self.recording = self.recorded()

    def recorded(self) -> Recording:
        found = recorded(self.outcome, Path.cwd())
        assert found.said == ["done"], found.said
        restore(self.before)
        return found

    def cut(self, count: int, seed: int) -> None:
        """Check about `count` outcomes."""
        of_each = max(3, count // (len(self.recording.operations) + 2))
        tried: set[tuple[str, ...]] = set()
        for outcome in outcomes(self.recording, of_each, seed):
            self.count += 1
            self.judge_files(outcome)
            left = tuple(sorted(outcome.files.keys() - self.before.keys()))
            if left not in tried and len(tried) <= self.count // TRIED_AGAIN:
                tried.add(left)
                self.judge_next(outcome)

    def judge_files(self, outcome: Outcome) -> None:
        found = self.values_of(outcome.files)
        if found == self.new or (found == self.old and not outcome.returned):
            return
        expected = "not the new state" if outcome.returned else "neither old nor new"
        what = found if isinstance(found, str) else differing(outcome.files, self.before)
        self.note(str(outcome), f"{expected}: {what}")

    def values_of(self, files: dict[str, bytes]) -> Any:
        """Return what a reader of these files finds."""
        if not self.is_checkpoint:
            return without_leftovers(files)
        restore(files)
        found = self.values()
        restore(self.before)
        return found

    def judge_next(self, outcome: Outcome) -> None:
        """Check that the next save works after any cut, and removes the leftovers."""
        restore(outcome.files)
        if self.name.startswith("first"):
            # It replaces no file.
            Path(NEW).unlink(missing_ok=True)
            shutil.rmtree(FRESH, ignore_errors=True)
        if os.waitpid(self.begun(), 0)[1] != 0 or tree() != self.after:
            self.note(str(outcome), f"the next time: {differing(tree(), self.after)}")
        restore(self.before)


class CutVolatile(Cut):
    """A save that does not wait for the disk. It may lose the file, but no wrong bytes pass their digests."""

    def __init__(self, name: str, write: Callable[[], object] | None = None) -> None:
        super().__init__(name, durable=False, write=write)

    def judge_files(self, outcome: Outcome) -> None:
        restore(outcome.files)
        data = Path(MODEL).read_bytes() if Path(MODEL).exists() else b""
        try:
            ingot.verify(MODEL)
        except (ingot.SafetensorError, OSError):
            data = b""
        if data not in (b"", self.before[MODEL], self.after[MODEL]):
            self.note(str(outcome), "wrong bytes pass their digests")
        restore(self.before)


class CutCheckpoints(Cut):
    """Save a step into a directory of checkpoints: the first, or one that removes the oldest step."""

    def __init__(self, name: str, steps: int) -> None:
        for _ in range(steps):
            save_next_step()
        super().__init__(name, write=save_next_step)

    def values(self) -> int | str:
        """Return the newest step, or 0. All steps must be whole."""
        with ingot.Checkpoints("run", framework="numpy") as checkpoints:
            found = {step: checkpoints.load(step=step) for step in checkpoints.steps()}
        for step, state in found.items():
            if state["step"] != step or not (state["array"] == step).all():
                return f"step {step} is mixed"
        return max(found, default=0)

    def values_of(self, files: dict[str, bytes]) -> int | str:
        restore(files)
        try:
            found = self.values()
        except (ingot.SafetensorError, OSError) as error:
            found = str(error)
        restore(self.before)
        return found

    def judge_next(self, outcome: Outcome) -> None:
        restore(outcome.files)
        step = self.values()
        if os.waitpid(self.begun(), 0)[1] != 0 or self.values() != int(step) + 1:
            self.note(str(outcome), f"the next time: {self.values()} after {step}")
        restore(self.before)


def save_next_step() -> None:
    with ingot.Checkpoints("run", keep=2, framework="numpy") as checkpoints:
        step = 0 if checkpoints.latest() is None else checkpoints.load()["step"]
        checkpoints.save(step + 1, {"array": numpy.full(3000, step + 1), "step": step + 1})


# Writers with a mistake


def without_flush() -> None:
    _write_aside()
    os.rename(".aside", MODEL)
    _flush(".")


def without_flush_of_directory() -> None:
    _write_aside()
    _flush(".aside")
    os.rename(".aside", MODEL)


def renamed_before_flush() -> None:
    _write_aside()
    os.rename(".aside", MODEL)
    _flush(MODEL)
    _flush(".")


PLANTED: dict[str, Callable[[], object]] = {
    "without flush": without_flush,
    "without flush of directory": without_flush_of_directory,
    "renamed before flush": renamed_before_flush,
}


def _write_aside() -> None:
    with open(".aside", "wb") as file:
        file.write(ingot.numpy.save({"a": numpy.arange(3000.0)}))


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
