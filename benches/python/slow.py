"""Loading from a mount on which every read takes 5 ms, as over a network. As a program: the table.

Each load is the first of a fresh process, from a mount of its own, so that nothing is in the page cache.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
SIDES = ("ingot", "safetensors mmap, every page touched", "safetensors pread")
OWED, AIM = 5, 20
DELAY = 0.005


def one(side: str, path: str) -> dict:
    """The first load of this process."""
    import loaders

    if side == "ingot":
        import ingot.torch

        # What it chooses of itself is what is measured.
        load = ingot.torch.load_file
    else:
        load = loaders.prepared(side)
    start = time.perf_counter()
    tensors = load(path)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "sums": [float(tensor.sum()) for tensor in tensors.values()]}


def measure(shown: Path, place: Path, rounds: int) -> dict[str, list[float]]:
    import fresh

    sys.path.insert(0, os.fspath(TESTS))
    from slow_disk import mounted

    found: dict[str, list[float]] = {side: [] for side in SIDES}
    sums = None
    for round_ in range(rounds):
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            with mounted(shown, place, delay=DELAY):
                run = fresh.run(Path(__file__), "--one", side, str(place / "model.safetensors"))
            assert sums in (None, run["sums"]), f"{side} loads something else"
            sums = run["sums"]
            found[side].append(run["seconds"])
    return found


def main() -> None:
    import safetensors.torch
    import torch

    import record

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="where to put 1 GB (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the file, for trying the code")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=given.dir) as directory:
        shown = Path(directory) / "shown"
        shown.mkdir()
        rows = max(1, round(4096 * given.scale))
        tensors = {f"layers.{i}": torch.full((rows, 4096), float(i)) for i in range(16)}
        safetensors.torch.save_file(tensors, shown / "model.safetensors")
        found = record.conditions(Path(directory), given.scale)
        samples = measure(shown, Path(directory) / "mount", given.rounds)
    medians = {side: statistics.median(times) for side, times in samples.items()}
    found["slow"] = {}
    for side, seconds in medians.items():
        ratio = seconds / medians["ingot"]
        goal = (OWED, AIM) if "mmap" in side else (None, None)
        verdict = "" if goal[0] is None else f"owed {OWED}, aim {AIM}"
        print(f"slow  {side:40} {seconds:8.3f} s {ratio:7.2f}× {verdict}", flush=True)
        found["slow"][side] = {
            "seconds": seconds,
            "ratio": ratio,
            "owed": goal[0],
            "aim": goal[1],
            "samples": samples[side],
        }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
