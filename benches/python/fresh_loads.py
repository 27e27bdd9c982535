"""Loading 2 GiB into memory of its own, each time in a fresh process. As a program: the table.

A process that loads in a loop reuses memory that is faulted in already, so every figure is the first load of
a process that has just touched and freed twice as much: otherwise the figure mostly shows how
fast a virtual machine's host finds memory.
"""

import os
from pathlib import Path

import fresh
import options
import pages
import sides
from goal import Goal
from turns import in_turn

# The measured sides, each with its required and its desired figure, if there is a promise.
WARM: sides.Goals = {
    "ingot": None,
    "safetensors pread": Goal(4, 7),
    "safetensors mmap and clone": Goal(1.8, 3),
    "torch.load(mmap=True) and clone": Goal(1.3, 3),
    "torch.load": None,
    "bintensors and clone": None,
    "numpy.load": None,
    "runai-model-streamer": Goal(1.3, 3),
    "fastsafetensors": None,
    "raw: 2 threads, populated huge pages": Goal(0.7, 0.95),
}
COLD: sides.Goals = {
    "ingot": None,
    "safetensors mmap, every page touched": Goal(1.1, 1.3),
    "safetensors pread": None,
    "torch.load(mmap=True) and clone": None,
    "runai-model-streamer": None,
    "fastsafetensors": None,
    "raw: 1 thread": None,
    "raw: 4 threads, O_DIRECT": None,
    "raw: 8 threads, O_DIRECT": None,
    "best raw": Goal(0.9, 0.97),
}
SMALL: sides.Goals = {
    side: Goal(20, 30) if side == "safetensors mmap and clone" else None
    for side in WARM
    if not side.startswith("raw")
}
ROWS = {"warm": WARM, "cold": COLD, "small": SMALL}
# MiB of memory that a load may take beside its tensors.
PEAK_GOAL = Goal(128, 32, of="figure")


def one(side: str, path: str, cache: str) -> dict:
    """The first load of this process."""
    import load_peers

    load, path = load_peers.prepared(side), load_peers.file(side, path)
    memory = 2 * os.path.getsize(path)
    if cache == "cold":
        pages.touch(memory)
        pages.drop(path)
    elif cache != "check":
        pages.warm(path, memory)
    tensors, found = fresh.measured(lambda: load(path))
    if cache == "check":
        import same

        found["digest"] = same.digest(tensors)
    return found


def write(path: Path, scale: float, rows: str) -> None:
    """A file of bf16 for every side: 2 GiB in matrices of 64 and 16 MiB, or 20,000 small tensors."""
    import bintensors.torch
    import numpy
    import safetensors.torch
    import torch

    torch.manual_seed(0)
    if rows == "small":
        shapes = [(8, 8)] * max(1, round(20_000 * scale))
    else:
        height = max(1, round(4096 * scale))
        shapes = [(height, 8192)] * 24 + [(height, 2048)] * 32
    tensors = {
        f"layers.{i}.weight": torch.randint(-128, 127, (r, 2 * c), dtype=torch.int8).view(torch.bfloat16)
        for i, (r, c) in enumerate(shapes)
    }
    safetensors.torch.save_file(tensors, path)
    torch.save(tensors, f"{path}.pt")
    bintensors.torch.save_file(tensors, f"{path}.bt")
    numpy.savez(f"{path}.npz", **{name: tensor.view(torch.int16).numpy() for name, tensor in tensors.items()})
    os.sync()


def measure(path: Path, cache: str, rounds: int, only: str | None) -> dict[str, list[dict]]:
    import load_peers

    known = [side for side in ROWS[cache] if side in load_peers.SIDES]
    wanted = [side for side in known if load_peers.is_here(side) and (only is None or only in side)]
    return in_turn(rounds, lambda side: fresh.one(Path(__file__), side, path, cache), wanted)


def show(cache: str, runs: dict[str, list[dict]], nbytes: int) -> dict:
    goals = ROWS[cache]
    found = sides.figures(runs, "ingot", goals)
    for side, figure in found.items():
        figure["peak_mib"] = sides.peak_mib(runs[side])
        figure["beside_tensors_mib"] = figure["peak_mib"] - nbytes / sides.MIB
    raw = [figure["seconds"] for side, figure in found.items() if side.startswith("raw")]
    if cache == "cold" and raw:
        found["best raw"] = sides.figure(min(raw), found["ingot"]["seconds"], goals["best raw"])
    for side, figure in found.items():
        print(sides.line(cache, side, figure, goals[side], figure.get("peak_mib")), flush=True)
    print(sides.memory(cache, found["ingot"]["beside_tensors_mib"], PEAK_GOAL))
    return found


def assert_same(path: Path) -> None:
    """Check that all sides that make tensors return the same bytes, before anything is timed."""
    import load_peers

    wanted = [side for side in WARM if not side.startswith("raw") and load_peers.is_here(side)]
    digests = {side: fresh.one(Path(__file__), side, path, "check")["digest"] for side in wanted}
    assert len(set(digests.values())) == 1, f"the bytes differ: {digests}"


def main() -> None:
    import record

    parser = options.parser(__doc__, room="9 GB", scaled=True, figures=True)
    parser.add_argument("--only", metavar="TEXT", help="only the sides whose name contains this; no check")
    parser.add_argument("--rows", choices=tuple(ROWS), help="only these")
    given = parser.parse_args()
    with options.place(given.dir) as directory:
        found = record.conditions(directory, given.scale)
        for rows in ROWS:
            if given.rows not in (None, rows):
                continue
            path = directory / f"{'small' if rows == 'small' else 'large'}.safetensors"
            if not path.exists():
                write(path, given.scale, rows)
                if given.only is None:
                    assert_same(path)
            runs = measure(path, rows, given.rounds, given.only)
            found[rows] = show(rows, runs, path.stat().st_size)
    if given.json:
        record.keep(found, given.json)


if __name__ == "__main__":
    fresh.start(one, main)
