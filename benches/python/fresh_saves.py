"""Saving 2 GiB as a new file, each time in a fresh process. As a program: the table.

A file is new in every run, since renaming over an old one makes some file systems flush the data first, and
the disk is idle when it begins. The process has just touched and freed twice as much memory, as in
`fresh_loads.py`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import fresh
import options
import pages
import raw
import sides
from goal import Goal
from turns import in_turn

# The sides that "ingot" is compared with in each row, each with its required and its desired figure.
ROWS: dict[str, sides.Goals] = {
    "cached": {
        "ingot": None,
        "safetensors": Goal(1.2, 1.6),
        "raw: 2 threads into a preallocated file": Goal(0.8, 0.95),
    },
    "durable": {
        "ingot, durable": None,
        "safetensors, then fsync of file and directory": Goal(1.3, 1.8),
        "raw: the same, then fsync": None,
    },
    "blocked": {
        "ingot, background": None,
        "ingot, background, snapshot=False": None,
        "ingot, durable": Goal(5, 20),
    },
}
# MiB of memory that a save may take beside its tensors.
PEAK_GOAL = Goal(64, 16, of="figure")

Tensors = dict[str, object]


def ingot_cached(tensors: Tensors, path: str) -> None:
    import ingot.torch

    ingot.torch.save_file(tensors, path, durable=False)


def ingot_durable(tensors: Tensors, path: str) -> None:
    import ingot.torch

    ingot.torch.save_file(tensors, path, durable=True)


def ingot_background(tensors: Tensors, path: str) -> object:
    import ingot.torch

    return ingot.torch.save_file(tensors, path, durable=True, background=True)


def ingot_background_shared(tensors: Tensors, path: str) -> object:
    import ingot.torch

    return ingot.torch.save_file(
        tensors, path, durable=True, background=True, write_options={"snapshot": False}
    )


def safetensors_cached(tensors: Tensors, path: str) -> None:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)


def safetensors_durable(tensors: Tensors, path: str) -> None:
    safetensors_cached(tensors, path)
    flush(path)


def raw_durable(tensors: Tensors, path: str) -> None:
    raw.saved(tensors, path)
    flush(path)


def flush(path: str) -> None:
    """A new file, and that it is there."""
    pages.flush(path)
    pages.flush(os.path.dirname(path))


SIDES: dict[str, Callable[[Tensors, str], object]] = {
    "ingot": ingot_cached,
    "ingot, durable": ingot_durable,
    "ingot, background": ingot_background,
    "ingot, background, snapshot=False": ingot_background_shared,
    "safetensors": safetensors_cached,
    "safetensors, then fsync of file and directory": safetensors_durable,
    "raw: 2 threads into a preallocated file": raw.saved,
    "raw: the same, then fsync": raw_durable,
}


def one(side: str, path: str, scale: str) -> dict:
    """Time the first save of this process. The clock stops when the caller continues."""
    import safetensors.torch
    import torch

    import ingot.torch  # noqa: F401

    rows = max(1, round(4096 * float(scale)))
    shapes = [(rows, 8192)] * 24 + [(rows, 2048)] * 32
    tensors = {
        f"layers.{i}.weight": torch.full(shape, i, dtype=torch.bfloat16) for i, shape in enumerate(shapes)
    }
    os.sync()
    # The page cache takes as much as the file, and a snapshot again as much.
    pages.touch(2 * sum(tensor.nbytes for tensor in tensors.values()))
    _, found = fresh.measured(
        lambda: SIDES[side](tensors, path), lambda pending: pending is not None and pending.result()
    )
    if not side.startswith("raw"):
        import same

        same.tensors(tensors, safetensors.torch.load_file(path))
    os.unlink(path)
    return found


def measure(place: Path, row: str, rounds: int, scale: float) -> dict[str, list[dict]]:
    def run(side: str) -> dict:
        return fresh.one(Path(__file__), side, place / "new.safetensors", scale)

    return in_turn(rounds, run, ROWS[row])


def show(row: str, runs: dict[str, list[dict]]) -> dict:
    found = sides.figures(runs, next(iter(ROWS[row])), ROWS[row])
    for side, figure in found.items():
        mib = figure["beside_tensors_mib"] = sides.peak_mib(runs[side])
        print(sides.line(row, side, figure, ROWS[row][side], mib), flush=True)
    return found


def main() -> None:
    import record

    parser = options.parser(__doc__, room="2 GB", scaled=True, figures=True)
    parser.add_argument("--rows", choices=tuple(ROWS), help="only these")
    given = parser.parse_args()
    with options.place(given.dir) as directory:
        found = record.conditions(directory, given.scale)
        for row in ROWS:
            if given.rows in (None, row):
                found[row] = show(row, measure(directory, row, given.rounds, given.scale))
    for row in ("cached", "durable"):
        if row in found:
            print(sides.memory(row, next(iter(found[row].values()))["beside_tensors_mib"], PEAK_GOAL))
    if given.json:
        record.keep(found, given.json)


if __name__ == "__main__":
    fresh.start(one, main)
