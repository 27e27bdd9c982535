"""Patches between two versions of a file: time, and size against the least possible.

    python benches/python/delta.py [--mib 2048] [--share 0.02] [--rounds 5] [--folder FOLDER]

The versions are in bf16. A share of their elements differs, at random positions. The result of each apply is
compared with the new version before its time counts.

- diff: against reading both files into memory, as ingot reads them
- apply in place, flushed: against writing the pages that change, flushed
- apply onto tensors on the CPU, by version ids: against `load_into` of the new version. Scattered changes of
  2 % of the elements are in half of all cache lines; also with changes in blocks of 4,096 elements
- size: against log2 of the number of ways to choose the positions, and the raw values
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

import ingot
import ingot.numpy
import ingot.torch
import pages

MIB = 1 << 20
PAGE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        measure(Path(folder), chosen.mib * MIB, chosen.share, chosen.rounds)
        for block, what in ((1, "scattered"), (4096, "in blocks")):
            live(Path(folder), chosen.mib * MIB, chosen.share, block, what, chosen.rounds)
        for share, what in ((0.001, "scattered"), (0.02, "scattered"), (0.1, "scattered"), (0.02, "blocks")):
            size(Path(folder), share, what)


def pair(folder: Path, nbytes: int, share: float, block: int = 1) -> tuple[Path, Path]:
    """Write two versions with eight tensors. Blocks of this many elements differ."""
    dice = numpy.random.default_rng(0)
    count = nbytes // 16
    old = {f"layer.{number}": dice.integers(0, 1 << 16, count, "u2") for number in range(8)}
    paths = folder / "old.safetensors", folder / "new.safetensors"
    save(old, paths[0])
    for array in old.values():
        chosen = numpy.repeat(dice.random(-(-count // block), "f4") < share, block)
        array[chosen[:count]] ^= 1
    save(old, paths[1])
    return paths


def save(arrays: dict[str, numpy.ndarray], path: Path) -> None:
    views = {
        name: {"dtype": "BF16", "shape": list(array.shape), "data": memoryview(array).cast("B")}
        for name, array in arrays.items()
    }
    ingot.serialize_file(views, path, checksums="xxh3")


def measure(folder: Path, nbytes: int, share: float, rounds: int) -> None:
    old, new = pair(folder, nbytes, share)
    patch, copy = folder / "patch.safetensors", folder / "copy.safetensors"

    def diff() -> None:
        ingot.delta.diff(old, new, patch, overwrite=True, durable=False)

    def read() -> None:
        for path in (old, new):
            ingot.numpy.load_file(path, backend="pread")

    compare("diff / reading both", diff, read, rounds)
    data = new.read_bytes()

    def patched() -> None:
        ingot.delta.apply(copy, patch, in_place=True)

    changed = changed_pages(old, new)

    def written() -> None:
        with open(copy, "r+b") as file:
            for begin, end in changed:
                os.pwrite(file.fileno(), data[begin:end], begin)
            os.fsync(file.fileno())

    def prepare() -> None:
        shutil.copyfile(old, copy)
        with open(copy, "r+b") as file:
            os.fsync(file.fileno())

    compare("apply in place / writing the changed pages", patched, written, rounds, prepare)
    assert copy.read_bytes() == data
    print(f"patch: {patch.stat().st_size / new.stat().st_size:.4f} of the file")


def live(folder: Path, nbytes: int, share: float, block: int, what: str, rounds: int) -> None:
    """Apply a patch to live tensors, and load the new version as a whole."""
    old, new = pair(folder, nbytes, share, block)
    patch = folder / "live.safetensors"
    ingot.delta.diff(old, new, patch, overwrite=True, durable=False)
    pages.touch(nbytes)
    pages.warm(new, nbytes)
    pages.warm(patch, patch.stat().st_size)
    tensors = ingot.torch.load_file(old, backend="pread")
    version = ingot.torch.load_into(tensors, old).version

    def patched() -> None:
        ingot.torch.load_into(tensors, version, patch=patch)

    def loaded() -> None:
        ingot.torch.load_into(tensors, new)

    # Checked once: applying a patch again changes nothing.
    patched()
    result = ingot.torch.load_file(new)
    for name, tensor in result.items():
        assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16))
    compare(f"apply onto live tensors, {what} / load_into", patched, loaded, rounds)


def changed_pages(old: Path, new: Path) -> list[tuple[int, int]]:
    """Return the runs of pages that differ."""
    ours, theirs = (numpy.fromfile(path, "u1") for path in (old, new))
    differs = numpy.logical_or.reduceat(ours != theirs, range(0, len(ours), PAGE))
    edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([False], differs, [False]))))
    return [(begin * PAGE, min(end * PAGE, len(ours))) for begin, end in edges.reshape(-1, 2).tolist()]


def compare(
    what: str,
    ours: Callable[[], None],
    theirs: Callable[[], None],
    rounds: int,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Print the ratio of the times of two functions, which run in turn."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds + 1):
        for name, work in (("theirs", theirs), ("ours", ours)):
            prepare()
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    one, two = (statistics.median(times[name][1:]) for name in ("ours", "theirs"))
    print(f"{what}: {one:.3f} s / {two:.3f} s = {one / two:.2f} x, speed {two / one:.2f}")


def size(folder: Path, share: float, what: str) -> None:
    """Print the size of the data of a patch against the least possible size."""
    count = 16 * MIB
    dice = numpy.random.default_rng(1)
    old = dice.integers(0, 1 << 16, count, "u2")
    new = old.copy()
    if what == "blocks":
        block = 1024
        chosen = numpy.repeat(dice.random(count // block) < share, block)
    else:
        chosen = dice.random(count) < share
    new[chosen] ^= 1
    k = int(chosen.sum())
    paths = folder / "a.safetensors", folder / "b.safetensors", folder / "c.safetensors"
    for array, path in zip((old, new), paths, strict=False):
        save({"weight": array}, path)
    ingot.delta.diff(*paths)
    bits = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)) / math.log(2)
    least = bits / 8 + 2 * k
    changed = ingot.delta.info(paths[2]).tensors["weight"]
    print(f"{share:.1%} {what}: {changed.codec}, {changed.nbytes / least:.3f} x the least possible size")
    for path in paths:
        path.unlink()


if __name__ == "__main__":
    main()
