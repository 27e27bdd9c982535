"""Program that makes each system call of a writer fail, interrupts it, or kills the writer before it.

It runs without other threads, in a folder that `furnish` has filled.
"""

from __future__ import annotations

import errno
import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from writers import SMALL, Writers, editors, writers

import ingot
import ingot._convert
import ingot.delta
import ingot.numpy
from support.supervised import KILL, OPENDIR, Decide, Ended, is_possible, supervised

OLD = {"a": numpy.ones(20_000), "b": numpy.arange(7)}
MODEL, NEW, FRESH, PATCH = "model.safetensors", "new.safetensors", "fresh", "patch.safetensors"

# The error of each failing call, as on a real system. All others fail with EIO.
FAILS = {
    "open": errno.EMFILE,
    "openat": errno.EMFILE,
    OPENDIR: errno.EMFILE,
    "openat2": errno.EMFILE,
    "write": errno.ENOSPC,
    "pwrite64": errno.ENOSPC,
    "writev": errno.ENOSPC,
    "pwritev": errno.ENOSPC,
    "pwritev2": errno.ENOSPC,
    "fallocate": errno.ENOSPC,
    "mkdir": errno.ENOSPC,
    "mkdirat": errno.ENOSPC,
    "link": errno.ENOSPC,
    "linkat": errno.ENOSPC,
    "flock": errno.ENOLCK,
    "fchmod": errno.EPERM,
    "fchown": errno.EPERM,
    "fsetxattr": errno.EPERM,
    "mmap": errno.ENOMEM,
    "clone": errno.EAGAIN,
    "clone3": errno.EAGAIN,
    "ioctl": errno.EOPNOTSUPP,
}
# Calls that look for leftovers and remove them.
CLEANING = ("unlink", "stat", "newfstatat", "fstat", "statx", "getdents64", OPENDIR)
# Calls that a signal may interrupt. They are then repeated.
INTERRUPTED = ["open", "openat", "read", "pread64", "write", "pwrite64", "fallocate", "ftruncate", "flock"]
INTERRUPTED += ["fsync", "fdatasync", "preadv", "pwritev", "copy_file_range", "sendfile"]


def furnish(folder: Path) -> None:
    """Create a file, another file, the first one as shards, and a patch of it."""
    folder.mkdir()
    ingot.numpy.save_file(OLD, folder / MODEL, {"format": "np"}, durable=False)
    ingot.numpy.save_file({"c": numpy.ones(9)}, folder / "other.safetensors", durable=False)
    ingot.split(folder / MODEL, folder / "shards", 100_000, durable=False)
    ingot.numpy.save_file({**OLD, "b": numpy.arange(9)}, folder / NEW, durable=False)
    ingot.delta.diff(folder / MODEL, folder / NEW, folder / PATCH, durable=False)
    (folder / NEW).unlink()


def ways(durable: bool) -> Writers:
    """Return all writers. Each changes `MODEL` or `shards` or makes `NEW`, with the same result each time."""
    anew: dict[str, Any] = {"durable": durable, "overwrite": True}
    return {
        **writers(MODEL, durable),
        **editors(MODEL, durable),
        "convert": lambda: ingot.convert("other.safetensors", MODEL, source_format="safetensors", **anew),
        "repair": lambda: ingot.repair("other.safetensors", MODEL, **anew),
        "patched": lambda: ingot.delta.apply(MODEL, PATCH, MODEL, **anew),
        "first save": lambda: ingot.numpy.save_file(SMALL, NEW, durable=durable),
        "first split": lambda: ingot.split(MODEL, f"{FRESH}/shards", 50, durable=durable),
        "first merge": lambda: ingot.merge([MODEL, "other.safetensors"], NEW, durable=durable),
        # The last one imports torch: see `Way`.
        "sharded": partial(save_sharded, **anew),
    }


def save_sharded(**anew: Any) -> None:
    import torch

    import ingot.torch

    state = {name: torch.from_numpy(numpy.ascontiguousarray(array)) for name, array in SMALL.items()}
    ingot.torch.save_sharded(state, "shards", 1000, **anew)


def tree() -> dict[str, bytes]:
    found = {}
    for folder, _, files in os.walk("."):
        for name in files:
            path = Path(folder, name)
            found[str(path)] = path.read_bytes()
    return found


def restore(files: dict[str, bytes], *, but_for_leftovers: bool = False) -> None:
    """Restore the files from before, and optionally keep leftovers."""
    for path in Path().rglob("*"):
        if path.is_file() and str(path) not in files and not (but_for_leftovers and path.name[0] == "."):
            path.unlink()
    for path in sorted(Path().rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    for name, data in files.items():
        path = Path(name)
        path.parent.mkdir(exist_ok=True, parents=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def without_leftovers(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without the leftovers that the next save removes."""
    return {name: data for name, data in files.items() if not os.path.basename(name).startswith(".")}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Way:
    """One writer, its results for the existing files, and the faults that were found."""

    def __init__(self, name: str, durable: bool = True, write: Callable[[], object] | None = None) -> None:
        if name == "sharded":
            # Import torch before the forks, and only here: it makes a fork six times slower.
            importlib.import_module("ingot.torch")
        self.name, self.write = name, write or ways(durable)[name]
        self.is_checkpoint = name in ("split", "sharded", "first split")
        self.before, self.old = tree(), self.values()
        self.wrong: list[str] = []
        self.count = 0
        begun = time.monotonic()
        assert os.waitpid(self.begun(), 0)[1] == 0
        self.took = time.monotonic() - begun
        self.after, self.new = tree(), self.values()
        assert self.after != self.before
        assert without_leftovers(self.after) == self.after
        restore(self.before)

    def begun(self) -> int:
        """Fork a child that runs the writer and exits with 0 on success. Return its process id."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(self.outcome() != ["done"])
            finally:
                os._exit(code)
        return child

    def outcome(self) -> list[Any]:
        """Run the writer in a child and return the outcome that the caller sees."""
        try:
            self.write()
        except (ingot.SafetensorError, OSError, MemoryError) as fault:
            return ["refused", type(fault).__name__, str(fault)]
        return ["done"]

    def note(self, what: str, found: str, ended: Ended | None = None) -> None:
        how = "" if ended is None else f"; exit {ended.code}, said {ended.said}"
        self.wrong.append(f"{self.name}, {what}: {found}{how}")

    def values(self) -> Any:
        """Return the tensors that a reader of the file and the checkpoint loads."""
        files = without_leftovers(tree())
        if not self.is_checkpoint:
            return files
        folder = f"{FRESH}/shards" if self.name == "first split" else "shards"
        if not Path(folder, "model.safetensors.index.json").exists():
            return files[MODEL], None
        try:
            loaded = ingot.numpy.load_file(folder)
        except (ingot.SafetensorError, OSError) as fault:
            return str(fault)
        return files[MODEL], {name: array.tobytes() for name, array in loaded.items()}

    def after_a_kill(self, what: str) -> None:
        """Check that the files are old or new and whole, and that the next save removes leftovers."""
        self.count += 1
        if self.values() not in (self.old, self.new):
            self.note(what, f"neither old nor new: {differing(tree(), self.before)}")
        restore(self.before, but_for_leftovers=True)
        if os.waitpid(self.begun(), 0)[1] != 0 or tree() != self.after:
            self.note(what, f"the next time: {differing(tree(), self.after)}")
        restore(self.before)

    def killed_at(self, moment: float) -> None:
        """Kill the writer this many seconds after it began."""
        child = self.begun()
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.after_a_kill(f"killed after {moment:.6f} s")


class Watched(Way):
    """Run the writer with faults in its system calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.folder = Path.cwd()
        clean = self.done(lambda *call: 0)
        assert clean.said == ["done"], clean
        self.calls = clean.calls
        restore(self.before)

    def done(self, decide: Decide) -> Ended:
        ended = supervised(self.outcome, self.folder, decide)
        assert ended is not None
        return ended

    def kinds(self) -> Iterator[tuple[str, int]]:
        for name, count in Counter(self.calls).items():
            for nth in range(1, count + 1):
                yield name, nth

    def failing(self, name: str, nth: int, number: int) -> Ended:
        return self.done(lambda call, count, _: number if (call, count) == (name, nth) else 0)

    def each_fails(self) -> None:
        """Check that the files are old or new and whole, as reported, with nothing beside them."""
        for name, nth in self.kinds():
            number = FAILS.get(name, errno.EIO)
            ended = self.failing(name, nth, number)
            self.judge(f"{name} {nth} fails with {errno.errorcode[number]}", ended, tree())
            restore(self.before)

    def judge(self, what: str, ended: Ended, files: dict[str, bytes]) -> None:
        self.count += 1
        if what.startswith(CLEANING) or "is written" in str(ended.said) or self.name == "download":
            # Leftovers that cannot be found or removed stay for the next save, and so do partial downloads.
            files = without_leftovers(files)
        if ended.code != 0 or not ended.said:
            self.note(what, "it neither returned nor raised", ended)
        elif ended.said == ["done"]:
            if files != self.after:
                self.note(what, f"false success: {differing(files, self.after)}", ended)
        elif files != self.before and not ("is written" in ended.said[2] and files == self.after):
            self.note(what, f"refused, and changed {differing(files, self.before)}", ended)

    def each_is_interrupted(self) -> None:
        """Check that an interrupted call causes no failure."""
        for name, nth in self.kinds():
            if name in INTERRUPTED:
                self.count += 1
                ended = self.failing(name, nth, errno.EINTR)
                if ended.said != ["done"] or tree() != self.after:
                    found = differing(tree(), self.after)
                    self.note(f"{name} {nth} is interrupted", f"differs in {found}", ended)
                restore(self.before)

    def each_is_the_last(self) -> None:
        """Kill the writer before each of its calls."""
        for last in range(1, len(self.calls) + 1):
            self.done(lambda name, nth, number, last=last: KILL if number == last else 0)
            self.after_a_kill(f"killed before call {last}, {self.calls[last - 1]}")


Findings = dict[str, tuple[int, list[str]]]


def findings(name: str) -> Findings | None:
    """Return the number of tries and the failures for each kind of fault. None if calls cannot be traced."""
    if not is_possible():
        return None
    way = Watched(name)
    kinds = {"fail": way.each_fails, "interrupted": way.each_is_interrupted, "killed": way.each_is_the_last}
    found: Findings = {}
    for what, each in kinds.items():
        way.count, way.wrong = 0, []
        each()
        found[what] = way.count, way.wrong
    return found


def killed_at_random(kills: int, seed: int) -> tuple[int, list[str]]:
    """Kill all writers equally often, each time at a random moment."""
    chance = random.Random(seed)
    names = list(ways(durable=True))
    known: dict[tuple[str, bool], Way] = {}
    for kill in range(kills):
        which = names[kill * len(names) // kills], chance.random() < 0.3
        if which not in known:
            known[which] = Way(*which)
        known[which].killed_at(chance.uniform(0, 1.2 * known[which].took))
    return sum(way.count for way in known.values()), [found for way in known.values() for found in way.wrong]
