"""Stacks the experts of a mixture while they are loaded, and by `torch.stack` after loading.

`python benches/python/remap.py --tensors 19008 --gib 4` is the size of the record: 19,008 tensors,
stacked into 48. Both sides run in turns, in processes of their own that have just touched and freed twice
the memory, with the file in the page cache. The bytes are compared first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

import fresh
import ingot
import pages
from ingot.remap import stack
from ingot.torch import load_file

STACKS = 48
Load = Callable[[Path], dict[str, torch.Tensor]]


def make(path: Path, tensors: int, nbytes: int) -> None:
    """Write a file of experts."""
    each = tensors // STACKS
    columns = 1024
    rows = max(1, nbytes // (STACKS * each * columns * 2))
    names = [f"layers.{layer}.experts.{e}.w.weight" for layer in range(STACKS) for e in range(each)]
    with ingot.Writer(path, dict.fromkeys(names, ("BF16", (rows, columns))), overwrite=True) as writer:
        for number, name in enumerate(names):
            values = torch.full((rows, columns), number % 251, dtype=torch.bfloat16)
            writer.write(name, values)
        writer.commit()


def remapped(path: Path) -> dict[str, torch.Tensor]:
    """Stack while loading."""
    return load_file(path, remap=[stack("layers.{i}.w", "layers.{i}.experts.{e}.w.weight")])


def stacked(path: Path, load: Load = load_file) -> dict[str, torch.Tensor]:
    """Load, and stack then."""
    tensors = load(path)
    each = len(tensors) // STACKS
    found = {}
    for layer in range(STACKS):
        names = [f"layers.{layer}.experts.{e}.w.weight" for e in range(each)]
        found[f"layers.{layer}.w"] = torch.stack([tensors.pop(name) for name in names])
    return found


SIDES = {
    "remap": remapped,
    "load and torch.stack": stacked,
    "safetensors and torch.stack": lambda path: stacked(path, safetensors.torch.load_file),
}


def measure(side: str, path: Path) -> dict[str, float]:
    """Load once in this process, which has nothing else in memory."""
    torch.zeros(1)
    pages.warm(path, 2 * path.stat().st_size)
    loaded, found = fresh.watched(lambda: SIDES[side](path))
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    return {"seconds": found["seconds"], "beside": max(0, found["anonymous"] - nbytes)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=19_008)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", choices=SIDES)
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measure(given.worker, given.path)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder, "experts.safetensors")
        make(path, given.tensors, int(given.gib * (1 << 30)))
        compare(path)
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(given.rounds):
            for side, found in runs.items():
                command = [sys.executable, __file__, "--worker", side, "--path", str(path)]
                found.append(json.loads(subprocess.check_output(command)))
        report(path, runs)


def compare(path: Path) -> None:
    """Check that both sides have the same bytes, which also warms the page cache."""
    one, other = remapped(path), stacked(path)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def report(path: Path, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print the median of each side and the ratio."""
    seconds = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
    print(f"{path.stat().st_size / (1 << 30):.2f} GiB, torch {torch.__version__}, ingot {ingot.__version__}")
    for side, found in runs.items():
        beside = max(run["beside"] for run in found) / (1 << 20)
        spread = [run["seconds"] for run in found]
        print(
            f"{side:27} median {seconds[side]:.3f} s ({min(spread):.3f} to {max(spread):.3f}), "
            f"{beside:.0f} MiB beside the result"
        )
    for side in seconds.keys() - {"remap"}:
        print(f"{side}: {seconds[side] / seconds['remap']:.2f} x the time of remap")


if __name__ == "__main__":
    main()
