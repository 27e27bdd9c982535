"""Saving 2 GiB as a new file, each time in a fresh process. As a program: the table.

A file is new in every run, since renaming over an old one makes some file systems flush the data first, and
the disk is idle when it begins.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fresh

MIB = 1 << 20
CHUNK = 8 * MIB
# Which sides are measured: what "ingot" is held against in each row, what is owed and what is aimed at.
ROWS: dict[str, dict[str, tuple[float, float] | None]] = {
    "cached": {
        "ingot": None,
        "safetensors": (1.2, 1.6),
        "raw: 2 threads into a preallocated file": (0.8, 0.95),
    },
    "durable": {
        "ingot, durable": None,
        "safetensors, then fsync of file and directory": (1.3, 1.8),
        "raw: the same, then fsync": None,
    },
    "blocked": {
        "ingot, background": None,
        "ingot, background, snapshot=False": None,
        "ingot, durable": (5, 20),
    },
}
# Bytes of memory that a save may take beside its tensors.
PEAK_GOAL = (64 * MIB, 16 * MIB)

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

    return ingot.torch.save_file(tensors, path, durable=True, background=True, snapshot=False)


def safetensors_cached(tensors: Tensors, path: str) -> None:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)


def safetensors_durable(tensors: Tensors, path: str) -> None:
    safetensors_cached(tensors, path)
    _flush(path, os.O_RDWR)
    _flush(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)


def raw_cached(tensors: Tensors, path: str) -> None:
    """The same bytes, written by position. What comes before them, a header, is left to be nothing."""
    pieces, nbytes = _pieces(tensors)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.posix_fallocate(file, 0, nbytes)
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                piece = next(pieces, None)
            if piece is None:
                return
            at, bytes_ = piece
            while bytes_:
                count = os.pwrite(file, bytes_, at)
                at, bytes_ = at + count, bytes_[count:]

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(file)


def raw_durable(tensors: Tensors, path: str) -> None:
    raw_cached(tensors, path)
    _flush(path, os.O_RDWR)
    _flush(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)


SIDES: dict[str, Callable[[Tensors, str], object]] = {
    "ingot": ingot_cached,
    "ingot, durable": ingot_durable,
    "ingot, background": ingot_background,
    "ingot, background, snapshot=False": ingot_background_shared,
    "safetensors": safetensors_cached,
    "safetensors, then fsync of file and directory": safetensors_durable,
    "raw: 2 threads into a preallocated file": raw_cached,
    "raw: the same, then fsync": raw_durable,
}


def _pieces(tensors: Tensors):
    """Where each part of the data goes, and the part; and how long the file is."""
    views, at = [], 0
    for tensor in tensors.values():
        nbytes = tensor.nbytes
        view = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
        views += [(at + begin, view[begin : begin + CHUNK]) for begin in range(0, nbytes, CHUNK)]
        at += nbytes
    return iter(views), at


def _flush(path: str, flags: int) -> None:
    file = os.open(path, flags)
    os.fsync(file)
    os.close(file)


def one(side: str, path: str, scale: float) -> dict:
    """The first save of this process. The clock stops when the caller goes on."""
    import safetensors.torch
    import torch

    import ingot.torch  # noqa: F401

    rows = max(1, round(4096 * scale))
    shapes = [(rows, 8192)] * 24 + [(rows, 2048)] * 32
    tensors = {
        f"layers.{i}.weight": torch.full(shape, i, dtype=torch.bfloat16) for i, shape in enumerate(shapes)
    }
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before = fresh.resident("VmRSS")
    start = time.perf_counter()
    pending = SIDES[side](tensors, path)
    seconds = time.perf_counter() - start
    if pending is not None:
        pending.result()
    peak = fresh.resident("VmHWM") - before
    if not side.startswith("raw"):
        found = safetensors.torch.load_file(path)
        assert found.keys() == tensors.keys(), side
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), side
    os.unlink(path)
    return {"seconds": seconds, "peak_nbytes": peak}


def measure(place: Path, row: str, rounds: int, scale: float) -> dict[str, list[dict]]:
    def run(side: str) -> dict:
        return fresh.run(Path(__file__), "--one", side, str(place / "new.safetensors"), str(scale))

    return fresh.in_turn(rounds, run, tuple(ROWS[row]))


def show(row: str, found: dict[str, list[dict]]) -> dict:
    ours = next(iter(ROWS[row]))
    medians = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    rows = {}
    for side, runs in found.items():
        ratio, peak = medians[side] / medians[ours], max(run["peak_nbytes"] for run in runs) / MIB
        owed, aim = ROWS[row][side] or (None, None)
        verdict = "" if owed is None else f"owed {owed:g}, aim {aim:g}"
        print(f"{row:8} {side:48} {medians[side]:8.3f} s {peak:7.0f} MiB {ratio:7.2f}× {verdict}", flush=True)
        samples = [run["seconds"] for run in runs]
        rows[side] = {
            "seconds": medians[side],
            "ratio": ratio,
            "owed": owed,
            "aim": aim,
            "beside_tensors_mib": peak,
            "samples": samples,
        }
    return rows


def main() -> None:
    import record

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="where to put 2 GB (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the file, for trying the code")
    parser.add_argument("--rows", choices=tuple(ROWS), help="only these")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=given.dir) as directory:
        found = record.conditions(Path(directory), given.scale)
        for row in ROWS:
            if given.rows in (None, row):
                found[row] = show(row, measure(Path(directory), row, given.rounds, given.scale))
    for row in ("cached", "durable"):
        if row in found:
            most = next(iter(found[row].values()))["beside_tensors_mib"]
            owed, aim = (goal // MIB for goal in PEAK_GOAL)
            print(f"{row:8} ingot takes {most:.0f} MiB beside the tensors: owed {owed} MiB, aim {aim} MiB")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], sys.argv[3], float(sys.argv[4]))))
    else:
        main()
