"""A training loop for hours. It loads, steps, saves in the background and prunes, while faults happen.

It loads from a disk, from a slow disk and from a flaky server. Other processes save to the same folder and
are killed. At times the loop rests. At each rest its memory and its number of descriptors must be as at the
first rest, and its folder must have only the checkpoints to keep. The values of every tensor are the number
of its step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import ingot
import ingot.torch
from support.processes import PRELUDE

Tensors = dict[str, torch.Tensor]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding.weight": ((1000, 700), torch.float32),
    "layer.weight": ((512, 512), torch.bfloat16),
    "layer.bias": ((512,), torch.float32),
    "mask": ((3, 7), torch.bool),
    "none": ((0, 4), torch.float16),
    "step": ((), torch.int64),
}
#: Enough for several threads to write it.
LARGE = {"moment": ((9_000_000,), torch.float32)}
#: Checkpoints that are kept.
KEPT = 3
STEPS_BEFORE_A_REST = 10
#: The least number of rests, so that there is something to compare.
FEWEST_RESTS = 6
#: Possible messages of a client of a failing server.
REFUSED = (ingot.SafetensorError, OSError)
OPTIONS = {"retries": 2, "stall_timeout": 0.25, "timeout": 10, "connect_timeout": 2}

#: A program that saves until it is killed, and prints a line when it has begun.
CHILD = """
import ingot.torch, soak
for step in range(int(sys.argv[2]), 1 << 40):
    pairs = {"step": str(step)}
    saved = ingot.torch.save_file(soak.state(step), sys.argv[1], pairs, background=step % 2 == 0)
    if saved is not None:
        saved.result()
    say(step)
"""


def state(step: int, *, is_large: bool = False) -> Tensors:
    """Return the tensors of a model and its optimizer at a step."""
    made = {}
    for name, (shape, dtype) in (SHAPES | (LARGE if is_large else {})).items():
        count = torch.Size(shape).numel()
        made[name] = ((torch.arange(count) * 7 + step * 13) % 113).to(dtype).reshape(shape)
    return made


def wrong_bytes(found: Tensors, expected: Tensors) -> int:
    """Return the number of wrong bytes in `found`."""
    if found.keys() != expected.keys():
        return sum(tensor.nbytes for tensor in expected.values())
    wrong = 0
    for name, tensor in expected.items():
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        wrong += int((one != other).sum()) if one.shape == other.shape else tensor.nbytes
    return wrong


def anonymous_nbytes() -> int:
    """Return the private memory of this process, without pages of the page cache."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@dataclass
class Rest:
    """The resources of an idle process."""

    nbytes: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Rest:
        gc.collect()
        # Freed memory that the allocator keeps does not count as growth.
        ctypes.CDLL(None).malloc_trim(0)
        return cls(anonymous_nbytes(), len(os.listdir("/proc/self/fd")), threads())


@dataclass
class Trainer:
    """One run with choices from `seed`; `slow` and `url` serve the same files as `folder`."""

    folder: Path
    slow: Path | None
    url: str
    seed: int
    step: int = 0
    #: The steps of the checkpoints that are kept, by name, the oldest first.
    kept: dict[str, int] = field(default_factory=dict)
    saving: dict[str, ingot.SaveFuture] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    left: list[str] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.weights = state(0)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def check(self, found: Tensors, expected: Tensors) -> None:
        self.wrong += wrong_bytes(found, expected)

    def train(self, seconds: float) -> dict[str, Any]:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or len(self.rests) < FEWEST_RESTS:
            self.take_a_step()
            if self.step % STEPS_BEFORE_A_REST == 0:
                self.rest()
        return self.report()

    def take_a_step(self) -> None:
        self.step += 1
        for name, tensor in state(self.step).items():
            self.weights[name].copy_(tensor)
        self.save()
        self.prune()
        if self.kept:
            self.random.choice([self.load, self.load_slowly, self.load_remotely, self.hold])()
        if self.step % 20 == 0:
            self.kill()

    # --- saving and pruning ---

    def save(self) -> None:
        name = f"step-{self.step}.{'bt' if self.step % 7 == 0 else 'safetensors'}"
        path, options = self.folder / name, {"metadata": {"step": str(self.step)}}
        way = self.random.choice(["copied", "copied", "staged", "sealed", "at once", "sharded"])
        self.count(f"saved {way}")
        if way == "sharded":
            name = f"step-{self.step}"
            saved = ingot.torch.save_sharded(
                self.weights, self.folder / name, max_shard_size="1MB", background=True
            )
        elif way == "at once":
            large = state(self.step, is_large=True)
            saved = ingot.torch.save_file(
                large, path, background=True, write_options={"snapshot": False}, **options
            )
        elif way == "staged":
            saved = ingot.torch.save_file(
                self.weights, path, background=True, write_options={"snapshot": False}, **options
            )
            saved.staged.result()
        else:
            sealed = {"checksums": True} if way == "sealed" else {}
            saved = ingot.torch.save_file(self.weights, path, background=True, **options, **sealed)
        self.saving[name] = saved

    def prune(self) -> None:
        """Wait until at most two saves run, and remove the oldest checkpoint."""
        while len(self.saving) > 2:
            name = next(iter(self.saving))
            self.saving.pop(name).result()
            self.kept[name] = int(name.split("-")[1].split(".")[0])
        while len(self.kept) > KEPT:
            name = next(iter(self.kept))
            del self.kept[name]
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # --- loading ---

    def chosen(self) -> tuple[str, Callable[[Tensors], Tensors]]:
        """Return a checkpoint and its expected contents. The checkpoint itself says whether it is large."""
        name = self.random.choice(list(self.kept))
        step = self.kept[name]
        return name, lambda found: state(step, is_large="moment" in found)

    def load(self) -> None:
        name, like = self.chosen()
        backend = self.random.choice(["auto", "mmap", "pread"])
        found = ingot.torch.load_file(self.folder / name, backend=backend)
        self.check(found, like(found))
        self.count("loaded")

    def load_slowly(self) -> None:
        if self.slow is not None:
            name, like = self.chosen()
            found = ingot.torch.load_file(self.slow / name)
            self.check(found, like(found))
            self.count("loaded from a slow disk")

    def load_remotely(self) -> None:
        name, like = self.chosen()
        if (self.folder / name).is_dir():
            name = f"{name}/model.safetensors.index.json"
        try:
            found = ingot.torch.load_file(f"{self.url}/{name}", storage_options=OPTIONS)
        except REFUSED:
            self.count("refused by a server")
        else:
            self.check(found, like(found))
            self.count("loaded from a server")

    def hold(self) -> None:
        """Open a handle, and use it after its file is gone."""
        name, like = self.chosen()
        with ingot.safe_open(self.folder / name, "pt") as handle:
            part = handle.get_slice("embedding.weight")[5:9]
            path = self.folder / name
            if path.is_file():
                path.unlink()
                del self.kept[name]
            with handle.prefetch() as loader:
                found = dict(loader)
            self.check(found, like(found))
            self.check({"embedding.weight": part}, {"embedding.weight": found["embedding.weight"][5:9]})
        self.count("held")

    # --- other processes ---

    def kill(self) -> None:
        """Kill a process while it replaces a file of its own. The next save must remove the leftovers."""
        path = self.folder / "other.safetensors"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PRELUDE + CHILD, str(path), str(self.step)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(self.random.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
        with ingot.safe_open(path, "pt", backend="pread") as handle:
            self.check(handle.get_tensors(), state(int(handle.metadata()["step"])))
        ingot.torch.save_file(self.weights, path)
        path.unlink()
        self.count("killed")

    # --- resources ---

    def rest(self) -> None:
        for name, saved in self.saving.items():
            saved.result()
            self.kept[name] = int(name.split("-")[1].split(".")[0])
        self.saving.clear()
        self.prune()
        self.left += sorted(set(os.listdir(self.folder)) - self.kept.keys())
        for name in self.kept:
            path = self.folder / name
            if path.is_dir():
                self.left += [each for each in os.listdir(path) if not each.startswith("model")]
        for _ in range(1200):
            if not self.rests or threads() == self.rests[0].threads:
                break
            # A thread that was joined may be listed for a moment.
            time.sleep(0.05)
        self.rests.append(Rest.now())

    def report(self) -> dict[str, Any]:
        """Return the results. `memory` is the last fifth of the rests relative to the second fifth."""
        fifth = max(1, len(self.rests) // 5)
        early, late = self.rests[fifth : 2 * fifth] or self.rests[:1], self.rests[-fifth:]
        growth = median(rest.nbytes for rest in late) - median(rest.nbytes for rest in early)
        return {
            "steps": self.step,
            "counts": self.counts,
            "wrong bytes": self.wrong,
            "left": self.left,
            "grown by": int(growth),
            "descriptors": self.rests[-1].descriptors - self.rests[0].descriptors,
            "threads": self.rests[-1].threads - self.rests[0].threads,
        }


def train(folder: str, slow: str, url: str, seconds: str, seed: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = Trainer(Path(folder), Path(slow) if slow else None, url, int(seed))
    return trainer.train(float(seconds))
