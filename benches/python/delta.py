"""Patches between two versions of a file, each row with its limit and the requirement.

    python benches/python/delta.py [ROW ...] [--mib 2048] [--share 0.02] [--rounds 5] [--folder FOLDER]

The versions are in bf16. A share of their elements differs, at random positions. Each result is compared with
the new version. Files are in a new directory in FOLDER, by default the directory for temporary files, and are
removed. They take at most three times `--mib`, and memory at most twice as much beside the page cache. Rows
that flush need a disk.

- `diff`: against reading both files into memory, as ingot reads them
- `in-place`: flushed, against writing the pages that change, flushed
- `sizes`: against log2 of the number of ways to choose the positions, and the raw values
- `live`: onto tensors on the CPU, by version ids, against `load_into` of the new version; for scattered
  elements and for blocks of 4,096 elements. 2 % of scattered elements are in half of all cache lines. So the
  row has a limit: a loop in C that stores the same elements at positions that it knows, with prefetches, by
  one thread and by one for each core. `cpu` is the CPU time of all threads, which other programs disturb less

Without a ROW, all are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

import ingot
import ingot.numpy
import ingot.torch
import pages

MIB = 1 << 20
PAGE = 4096
STEP = 64 * MIB

STORE = r"""
#include <stddef.h>
#include <stdint.h>
void store(uint16_t *into, const uint32_t *at, const uint16_t *values, size_t count) {
    for (size_t number = 0; number < count; number++) {
        __builtin_prefetch(&into[at[number + 64 < count ? number + 64 : number]], 1);
        into[at[number]] = values[number];
    }
}
"""


class Times(NamedTuple):
    """Median seconds, and the least CPU seconds."""

    wall: float
    cpu: float


def main() -> None:
    rows = {"diff": diff, "in-place": in_place, "sizes": sizes, "live": live}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[[], *rows], metavar="ROW")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for row in chosen.rows or rows:
            rows[row](Path(folder), chosen)
            for path in Path(folder).iterdir():
                path.unlink()


def pair(folder: Path, chosen: argparse.Namespace, block: int = 1) -> tuple[Path, Path]:
    """Write two versions with eight tensors. Blocks of this many elements differ."""
    dice = numpy.random.default_rng(0)
    count = chosen.mib * MIB // 16
    arrays = {f"layer.{number}": dice.integers(0, 1 << 16, count, "u2") for number in range(8)}
    paths = folder / "old.safetensors", folder / "new.safetensors"
    save(arrays, paths[0])
    for array in arrays.values():
        differs = numpy.repeat(dice.random(-(-count // block), "f4") < chosen.share, block)
        array[differs[:count]] ^= 1
    save(arrays, paths[1])
    return paths


def save(arrays: dict[str, numpy.ndarray], path: Path) -> None:
    views = {
        name: {"dtype": "BF16", "shape": list(array.shape), "data": memoryview(array).cast("B")}
        for name, array in arrays.items()
    }
    ingot.serialize_file(views, path, checksums="xxh3")


def diff(folder: Path, chosen: argparse.Namespace) -> None:
    old, new = pair(folder, chosen)
    patch = folder / "patch.safetensors"

    def ours() -> None:
        ingot.delta.diff(old, new, patch, overwrite=True, durable=False)

    def read() -> None:
        for path in (old, new):
            ingot.numpy.load_file(path, backend="pread")

    one, two = measured(ours, read, chosen.rounds)
    print(f"patch: {patch.stat().st_size / new.stat().st_size:.4f} of the file")
    told("diff, its speed against reading both", one, two, two.wall / one.wall, "at least 0.5, aim 0.8")


def in_place(folder: Path, chosen: argparse.Namespace) -> None:
    old, new = pair(folder, chosen)
    patch, copy = folder / "patch.safetensors", folder / "copy.safetensors"
    ingot.delta.diff(old, new, patch)
    changed = [*changed_pages(old, new)]
    data = numpy.memmap(new, "u1", "r")

    def patched() -> None:
        ingot.delta.apply(copy, patch, in_place=True)

    def written() -> None:
        with open(copy, "r+b") as file:
            for begin, end in changed:
                os.pwrite(file.fileno(), data[begin:end], begin)
            os.fsync(file.fileno())

    def prepare() -> None:
        shutil.copyfile(old, copy)
        pages.flush(copy)

    pages.warm(new, STEP)
    one, two = measured(patched, written, chosen.rounds, prepare)
    assert not [*changed_pages(copy, new)]
    told(
        "apply in place against writing the changed pages",
        one,
        two,
        one.wall / two.wall,
        "at most 1.5, aim 1.2",
    )


def changed_pages(old: Path, new: Path) -> Iterator[tuple[int, int]]:
    """Yield the runs of pages that differ."""
    ours, theirs = (numpy.memmap(path, "u1", "r") for path in (old, new))
    for first in range(0, len(ours), STEP):
        apart = ours[first : first + STEP] != theirs[first : first + STEP]
        differs = numpy.logical_or.reduceat(apart, range(0, len(apart), PAGE))
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([False], differs, [False]))))
        for begin, end in (first + edges * PAGE).reshape(-1, 2).tolist():
            yield begin, min(end, len(ours))


def sizes(folder: Path, chosen: argparse.Namespace) -> None:
    """Print the sizes of the data of patches against the least possible ones."""
    for share, what, limit in (
        (0.001, "scattered", 1.10),
        (0.02, "scattered", 1.10),
        (0.1, "scattered", 1.10),
        (0.02, "in blocks", 1.05),
        (1.0, "one layer", 1.01),
    ):
        # Of one layer, all elements: the patch has it whole.
        count, block = 16 * MIB, 1024 if what == "in blocks" else 1
        dice = numpy.random.default_rng(1)
        old = dice.integers(0, 1 << 16, count, "u2")
        differs = numpy.repeat(dice.random(count // block) < share, block)
        new = old ^ differs
        paths = folder / "a.safetensors", folder / "b.safetensors", folder / "c.safetensors"
        for array, path in zip((old, new), paths, strict=False):
            save({"same": old, "weight": array}, path)
        ingot.delta.diff(*paths, overwrite=True)
        k = int(differs.sum())
        bits = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)) / math.log(2)
        [changed] = ingot.delta.info(paths[2]).tensors.values()
        ratio = changed.nbytes / (bits / 8 + 2 * k)
        print(
            f"size, {share:.1%} {what}: {changed.codec}, {ratio:.3f} x the least (required: at most {limit})"
        )


def live(folder: Path, chosen: argparse.Namespace) -> None:
    """Apply a patch to live tensors, and load the new version as a whole."""
    for block, what in ((1, "scattered"), (4096, "in blocks")):
        old, new = pair(folder, chosen, block)
        patch = folder / "live.safetensors"
        ingot.delta.diff(old, new, patch, overwrite=True, durable=False)
        pages.touch(chosen.mib * MIB)
        for path in (new, patch):
            pages.warm(path, path.stat().st_size)
        tensors = ingot.torch.load_file(old, backend="pread")
        version = ingot.torch.load_into(tensors, old).version

        def patched(tensors=tensors, version=version, patch=patch) -> None:
            ingot.torch.load_into(tensors, version, patch=patch)

        def loaded(tensors=tensors, new=new) -> None:
            ingot.torch.load_into(tensors, new)

        # Checked once: applying a patch again changes nothing.
        patched()
        for name, tensor in ingot.torch.load_file(new).items():
            assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16))
        one, two = measured(patched, loaded, chosen.rounds)
        name = f"apply onto live tensors, {what}, against load_into"
        told(name, one, two, two.wall / one.wall, "at least 5, aim 15")
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            loop, two = measured(stores(folder, patch, tensors, threads), loaded, chosen.rounds)
            told(f"limit: bare stores, {what}, {threads} threads", loop, two, two.wall / loop.wall, "none")


def stores(folder: Path, patch: Path, tensors: dict[str, torch.Tensor], threads: int) -> Callable[[], None]:
    """Return a function that stores the elements of a patch by a loop in C."""
    source, library = folder / "store.c", folder / "store.so"
    source.write_text(STORE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    store = ctypes.CDLL(str(library)).store
    store.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    work = []
    for item in ingot.delta.items(patch):
        values = numpy.frombuffer(item.values, "u2")
        at = numpy.asarray(item.positions) if item.positions else numpy.arange(len(values)) + item.begin
        work.append((tensors[item.name].data_ptr(), at.astype("u4"), values))

    def one(part: tuple[int, numpy.ndarray, numpy.ndarray]) -> None:
        into, at, values = part
        # ctypes releases the lock of the interpreter.
        store(into, at.ctypes.data, values.ctypes.data, len(at))

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, work))

    return run


def measured(
    ours: Callable[[], None],
    theirs: Callable[[], None],
    rounds: int,
    prepare: Callable[[], None] = lambda: None,
) -> tuple[Times, Times]:
    """Return the times of two functions, which run in turn. The first round does not count."""
    found: dict[Callable[[], None], list[Times]] = {ours: [], theirs: []}
    for _ in range(rounds + 1):
        for work in (theirs, ours):
            prepare()
            before, begin = cpu(), time.perf_counter()
            work()
            found[work].append(Times(time.perf_counter() - begin, cpu() - before))

    def chosen(times: list[Times]) -> Times:
        return Times(statistics.median(one.wall for one in times[1:]), min(one.cpu for one in times[1:]))

    return chosen(found[ours]), chosen(found[theirs])


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def told(row: str, one: Times, two: Times, ratio: float, required: str) -> None:
    times = f"{one.wall:.3f} s / {two.wall:.3f} s, cpu {one.cpu:.3f} s / {two.cpu:.3f} s"
    print(f"{row}: {ratio:.2f} x (required: {required}); {times}", flush=True)


if __name__ == "__main__":
    main()
