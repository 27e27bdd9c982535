"""Loading from a mount on which every read takes 5 ms, as over a network. As a program: the table.

Each load is the first of a fresh process, from a mount of its own, so that nothing is in the page cache.
"""

import os
import sys
import time
from pathlib import Path

import fresh
import options
import sides
from goal import Goal
from turns import in_turn

TESTS = Path(__file__).parents[2] / "tests"
SIDES: sides.Goals = {
    "ingot": None,
    "safetensors mmap, every page touched": Goal(5, 20),
    "safetensors pread": None,
}
DELAY = 0.005


def one(side: str, path: str) -> dict:
    """The first load of this process."""
    import load_peers

    if side == "ingot":
        import ingot.torch

        # The default choice is measured.
        load = ingot.torch.load_file
    else:
        load = load_peers.prepared(side)
    start = time.perf_counter()
    tensors = load(path)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "sums": [float(tensor.sum()) for tensor in tensors.values()]}


def measure(shown: Path, place: Path, rounds: int) -> dict[str, list[dict]]:
    sys.path.insert(0, os.fspath(TESTS))
    from support.slow_disk import mounted

    def run(side: str) -> dict:
        with mounted(shown, place, delay=DELAY):
            return fresh.one(Path(__file__), side, place / "model.safetensors")

    found = in_turn(rounds, run, SIDES)
    expected = found["ingot"][0]["sums"]
    for side, runs in found.items():
        assert all(run["sums"] == expected for run in runs), f"{side} loads something else"
    return found


def main() -> None:
    import safetensors.torch
    import torch

    import record

    given = options.parser(__doc__, room="1 GB", scaled=True, figures=True).parse_args()
    with options.place(given.dir) as directory:
        shown = directory / "shown"
        shown.mkdir()
        rows = max(1, round(4096 * given.scale))
        tensors = {f"layers.{i}": torch.full((rows, 4096), float(i)) for i in range(16)}
        safetensors.torch.save_file(tensors, shown / "model.safetensors")
        found = record.conditions(directory, given.scale)
        runs = measure(shown, directory / "mount", given.rounds)
    found["slow"] = sides.figures(runs, "ingot", SIDES)
    for side, figure in found["slow"].items():
        print(sides.line("slow", side, figure, SIDES[side]))
    if given.json:
        record.keep(found, given.json)


if __name__ == "__main__":
    fresh.start(one, main)
