"""Loading 2 GiB into memory of its own, each time in a fresh process. As a program: the table.

A process that loads in a loop reuses memory that is faulted in already, so every figure is the first load of
a process that has just touched and freed twice as much: else what is timed is how fast a virtual machine's
host finds memory.
"""

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import statistics
import sys
import time
from pathlib import Path

import fresh

# Which sides are measured, and where a figure is promised against one, what is owed and what is aimed at.
WARM: dict[str, tuple[float, float] | None] = {
    "ingot": None,
    "safetensors pread": (4, 7),
    "safetensors mmap and clone": (1.8, 3),
    "torch.load(mmap=True) and clone": (1.3, 3),
    "torch.load": None,
    "bintensors and clone": None,
    "numpy.load": None,
    "runai-model-streamer": (1.3, 3),
    "fastsafetensors": None,
    "raw: 2 threads, populated huge pages": (0.7, 0.95),
}
COLD: dict[str, tuple[float, float] | None] = {
    "ingot": None,
    "safetensors mmap, every page touched": (1.1, 1.3),
    "safetensors pread": None,
    "torch.load(mmap=True) and clone": None,
    "runai-model-streamer": None,
    "fastsafetensors": None,
    "raw: 1 thread": None,
    "raw: 4 threads, O_DIRECT": None,
    "raw: 8 threads, O_DIRECT": None,
    "best raw": (0.9, 0.97),
}
SMALL: dict[str, tuple[float, float] | None] = {
    side: (20, 30) if side == "safetensors mmap and clone" else None
    for side in WARM
    if not side.startswith("raw")
}
ROWS = {"warm": WARM, "cold": COLD, "small": SMALL}
# Bytes of memory that a load may take beside its tensors.
PEAK_GOAL = (128 << 20, 32 << 20)


def one(side: str, path: str, cache: str) -> dict:
    """The first load of this process."""
    import loaders

    load = loaders.prepared(side)
    _touch(2 * os.path.getsize(path))
    if cache == "cold":
        _drop(path)
    Path("/proc/self/clear_refs").write_text("5")
    before = fresh.resident("VmRSS")
    start = time.perf_counter()
    tensors = load(path)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak_nbytes": fresh.resident("VmHWM") - before}
    if cache == "check":
        found["sha256"] = _digest(tensors)
    return found


def _touch(nbytes: int) -> None:
    """Has the host find memory, and frees it.

    In small pages and then in huge ones: the system keeps the two apart when they are freed, and each side
    shall find what it asks for, whichever that is.
    """
    import torch

    import raw

    memory = torch.empty(nbytes, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE] = 1
    del memory
    view, _ = raw.huge_pages(nbytes, ctypes.CDLL(None))
    torch.frombuffer(view, dtype=torch.uint8)[:: mmap.PAGESIZE] = 1


def _drop(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def _digest(tensors) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy())
    return digest.hexdigest()


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
    import loaders

    known = [side for side in ROWS[cache] if side in loaders.SIDES]
    sides = [side for side in known if loaders.is_here(side) and (only is None or only in side)]
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            found[side].append(fresh.run(Path(__file__), "--one", side, str(path), cache))
    return found


def show(
    cache: str, found: dict[str, list[dict]], goals: dict[str, tuple[float, float] | None], nbytes: int
) -> dict:
    rows = {}
    medians = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    raw = [median for side, median in medians.items() if side.startswith("raw")]
    if cache == "cold" and raw:
        medians["best raw"] = min(raw)
    if "ingot" not in medians:
        raise SystemExit("every ratio is to ingot: --only has to leave it in")
    for side, median in medians.items():
        ratio = median / medians["ingot"]
        owed, aim = goals.get(side) or (None, None)
        row = {"seconds": median, "ratio": ratio, "owed": owed, "aim": aim}
        if side in found:
            row["peak_mib"] = max(run["peak_nbytes"] for run in found[side]) / (1 << 20)
            row["beside_tensors_mib"] = row["peak_mib"] - nbytes / (1 << 20)
            row["samples"] = [run["seconds"] for run in found[side]]
        rows[side] = row
        verdict = "" if owed is None else f"owed {owed:g}, aim {aim:g}"
        peak = f"{row['peak_mib']:8.0f} MiB" if "peak_mib" in row else " " * 12
        print(f"{cache:5} {side:40} {median:8.3f} s {peak} {ratio:7.2f}× {verdict}", flush=True)
    over = rows["ingot"]["beside_tensors_mib"] * (1 << 20)
    owed, aim = (goal >> 20 for goal in PEAK_GOAL)
    print(
        f"{cache:5} ingot takes {over / (1 << 20):.0f} MiB beside its tensors: owed {owed} MiB, aim {aim} MiB"
    )
    return rows


def assert_same(path: Path) -> None:
    """Every side that makes tensors gives the same bytes, before anything is timed."""
    import loaders

    sides = [side for side in WARM if not side.startswith("raw") and loaders.is_here(side)]
    digests = {side: fresh.run(Path(__file__), "--one", side, str(path), "check")["sha256"] for side in sides}
    assert len(set(digests.values())) == 1, f"the bytes differ: {digests}"


def main() -> None:
    import tempfile

    import record

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, help="where to put 9 GB of files (default: a temporary directory)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the files, for trying the code")
    parser.add_argument("--only", metavar="TEXT", help="only the sides whose name contains this; no check")
    parser.add_argument("--rows", choices=tuple(ROWS), help="only these")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=given.dir) as directory:
        found = record.conditions(Path(directory), given.scale)
        for rows, goals in ROWS.items():
            if given.rows not in (None, rows):
                continue
            path = Path(directory) / f"{'small' if rows == 'small' else 'large'}.safetensors"
            if not path.exists():
                write(path, given.scale, rows)
                if given.only is None:
                    assert_same(path)
            samples = measure(path, rows, given.rounds, given.only)
            found[rows] = show(rows, samples, goals, path.stat().st_size)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
