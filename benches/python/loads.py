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
import threading
import time
from collections.abc import Callable
from pathlib import Path

CHUNK = 8 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23


def ingot_pread(path: str) -> object:
    import ingot.torch

    return ingot.torch.load_file(path, backend="pread")


def safetensors_pread(path: str) -> object:
    import safetensors.torch

    return safetensors.torch.load_file(path, backend="pread")


def safetensors_clone(path: str) -> object:
    import safetensors.torch

    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


def safetensors_touched(path: str) -> object:
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(path)
    for tensor in tensors.values():
        tensor.view(torch.uint8).reshape(-1)[:: mmap.PAGESIZE].sum()
    return tensors


def torch_clone(path: str) -> object:
    import torch

    loaded = torch.load(f"{path}.pt", mmap=True, weights_only=True)
    return {name: tensor.clone() for name, tensor in loaded.items()}


def raw_populated(path: str) -> object:
    """Two threads that populate private huge pages chunk by chunk, and `preadv` into them."""
    return _raw(path, 2, 0, True)


def raw_sequential(path: str) -> object:
    """One thread, 4 MiB at a time, into a buffer that it reuses."""
    file = os.open(path, os.O_RDONLY)
    with mmap.mmap(-1, 4 << 20) as buffer:
        position = 0
        while count := os.preadv(file, [buffer], position):
            position += count
    os.close(file)


def raw_four(path: str) -> object:
    """Four threads, buffered."""
    return _raw(path, 4, 0, False)


def raw_direct(path: str) -> object:
    """Sixteen threads past the page cache."""
    return _raw(path, 16, os.O_DIRECT, False)


def _raw(path: str, threads: int, flags: int, keep: bool) -> object:
    """Reads with `threads` threads: into fresh huge pages if they are kept, else each into its own buffer."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | flags)
    nbytes = os.fstat(file).st_size
    chunks = iter(range(0, nbytes, CHUNK))
    taking = threading.Lock()
    pages = _huge(nbytes + CHUNK, libc) if keep else None

    def work() -> None:
        own = pages or _huge(CHUNK, libc)
        while True:
            with taking:
                at = next(chunks, None)
            if at is None:
                return
            view, start = own
            here = at if keep else 0
            if keep:
                libc.madvise(ctypes.c_void_p(start + here), ctypes.c_size_t(CHUNK), MADV_POPULATE_WRITE)
            os.preadv(file, [view[here : here + CHUNK]], at)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(file)
    return pages


def _huge(nbytes: int, libc: ctypes.CDLL) -> tuple[memoryview, int]:
    """Private memory on the border of a huge page, and its address."""
    page = 2 << 20
    view = memoryview(mmap.mmap(-1, nbytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    skip = -address % page
    libc.madvise(ctypes.c_void_p(address + skip), ctypes.c_size_t(nbytes), MADV_HUGEPAGE)
    return view[skip : skip + nbytes], address + skip


WARM: dict[str, Callable[[str], object]] = {
    "ingot": ingot_pread,
    "safetensors pread": safetensors_pread,
    "safetensors mmap and clone": safetensors_clone,
    "torch.load(mmap=True) and clone": torch_clone,
    "raw: 2 threads, populated huge pages": raw_populated,
}
COLD: dict[str, Callable[[str], object]] = {
    "ingot": ingot_pread,
    "safetensors mmap, every page touched": safetensors_touched,
    "raw: 1 thread": raw_sequential,
    "raw: 4 threads": raw_four,
    "raw: 16 threads, O_DIRECT": raw_direct,
}
# What a row is divided by, and the figures owed and aimed at.
WARM_GOALS = {
    "safetensors pread": (4, 7),
    "safetensors mmap and clone": (1.8, 3),
    "torch.load(mmap=True) and clone": (1.3, 3),
    "raw: 2 threads, populated huge pages": (0.7, 0.95),
}
COLD_GOALS = {"safetensors mmap, every page touched": (1.1, 1.3), "best raw": (0.9, 0.97)}


def one(side: str, path: str, cache: str) -> dict:
    """The first load of this process."""
    load = (COLD if cache == "cold" else WARM)[side]
    # Imports are not what is measured.
    import safetensors.torch  # noqa: F401

    _touch(2 * os.path.getsize(path))
    if cache == "cold":
        _drop(path)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    start = time.perf_counter()
    tensors = load(path)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak_nbytes": _resident("VmHWM") - before}
    if cache == "check":
        found["sha256"] = _digest(tensors)
    return found


def _touch(nbytes: int) -> None:
    """Has the host find memory, in small pages and in huge ones, which the system keeps apart when freed."""
    import torch

    memory = torch.empty(nbytes, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE] = 1
    del memory
    view, _ = _huge(nbytes, ctypes.CDLL(None))
    torch.frombuffer(view, dtype=torch.uint8)[:: mmap.PAGESIZE] = 1


def _drop(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _digest(tensors) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy())
    return digest.hexdigest()


def write(path: Path, scale: float) -> None:
    """A file of 2 GiB, bf16, in matrices of 64 MiB and 16 MiB, and the same for torch."""
    import safetensors.torch
    import torch

    torch.manual_seed(0)
    rows = max(1, round(4096 * scale))
    sizes = [(rows, 8192)] * 24 + [(rows, 2048)] * 32
    tensors = {
        f"layers.{i}.weight": torch.randint(-128, 127, (r, 2 * c), dtype=torch.int8).view(torch.bfloat16)
        for i, (r, c) in enumerate(sizes)
    }
    safetensors.torch.save_file(tensors, path)
    torch.save(tensors, f"{path}.pt")
    os.sync()


def measure(path: Path, cache: str, rounds: int, only: str | None) -> dict[str, list[dict]]:
    import fresh

    sides = [side for side in (WARM if cache == "warm" else COLD) if only is None or only in side]
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            found[side].append(fresh.run(Path(__file__), "--one", side, str(path), cache))
    return found


def show(cache: str, found: dict[str, list[dict]], goals: dict[str, tuple[float, float]]) -> dict:
    rows = {}
    medians = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    raw = [median for side, median in medians.items() if side.startswith("raw")]
    if cache == "cold" and raw:
        medians["best raw"] = min(raw)
    for side, median in medians.items():
        ratio = median / medians["ingot"]
        owed, aim = goals.get(side, (None, None))
        row = {"seconds": median, "ratio": ratio, "owed": owed, "aim": aim}
        if side in found:
            row["peak_mib"] = max(run["peak_nbytes"] for run in found[side]) / (1 << 20)
            row["samples"] = [run["seconds"] for run in found[side]]
        rows[side] = row
        verdict = "" if owed is None else f"owed {owed:g}, aim {aim:g}"
        peak = f"{row['peak_mib']:8.0f} MiB" if "peak_mib" in row else " " * 12
        print(f"{cache:5} {side:40} {median:8.3f} s {peak} {ratio:7.2f}× {verdict}", flush=True)
    return rows


def assert_same(path: Path) -> None:
    """Every side that makes tensors gives the same bytes, before anything is timed."""
    import fresh

    sides = [side for side in WARM if not side.startswith("raw")]
    digests = {fresh.run(Path(__file__), "--one", side, str(path), "check")["sha256"] for side in sides}
    assert len(digests) == 1, "the bytes differ"


def main() -> None:
    import tempfile

    import record

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, help="where to put 5 GB of files (default: a temporary directory)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the file, for trying the code")
    parser.add_argument("--only", metavar="TEXT", help="only the sides whose name contains this; no check")
    parser.add_argument("--cache", choices=("warm", "cold"), help="only this")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as directory:
        path = (given.dir or Path(directory)) / f"loads-{given.scale:g}.safetensors"
        if not path.exists():
            write(path, given.scale)
        if given.only is None:
            assert_same(path)
        found = record.conditions(path.parent, given.scale)
        for cache, goals in (("warm", WARM_GOALS), ("cold", COLD_GOALS)):
            if given.cache in (None, cache):
                found[cache] = show(cache, measure(path, cache, given.rounds, given.only), goals)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
