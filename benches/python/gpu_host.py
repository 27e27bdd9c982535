"""The host's side of a load onto a GPU: processor time for each GiB.

There is no GPU: on the simulated driver of the tests, each copy takes the time of a link of 55 GB/s and
moves no bytes. So the figures measure reads into pinned memory and calls of the driver. Files are in the page
cache (warm) or not (cold). Beside each figure is that of plain reads of the file, in the same run.
"""

import ctypes
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.devices.simulator import Gpus

import ingot.numpy
import options
import pages
from goal import Goal

LINK = 55e9
MIB = 1 << 20


def file_of(folder: Path, mib: int) -> Path:
    """Write a file of tensors of 64 MiB."""
    random = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    path = folder / "model.safetensors"
    ingot.numpy.save_file({f"layer.{number:05}": random for number in range(max(1, mib // 64))}, path)
    return path


def warm(path: Path) -> None:
    """Bring all of a file into the page cache, since a load of a cold file reads past the cache."""
    pages.warm(path, 64 << 20)


def used(work: Callable[[], Any]) -> float:
    """Return the processor time of `work` in seconds."""
    begun = resource.getrusage(resource.RUSAGE_SELF)
    kept = work()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    del kept
    return ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime


def read(path: Path, flags: int) -> None:
    """Read a file as plainly as possible: one thread for each core, each with 1 MiB of a huge page.

    The system copies each byte once, or the disk writes it there. No load can use less processor time.
    """
    file, cores = os.open(path, os.O_RDONLY | flags), len(os.sched_getaffinity(0))

    def part(number: int) -> None:
        view, address = pages.private(pages.HUGE)
        pages.populate(address, pages.HUGE)
        for position in range(number * MIB, path.stat().st_size, cores * MIB):
            os.preadv(file, [view[:MIB]], position)

    try:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(part, range(cores)))
    finally:
        os.close(file)


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="the size of the file")
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args()
    rows = []
    # Not in memory: a file of tmpfs is never cold.
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=Path.cwd()) as folder:
        path = file_of(Path(folder), given.mib)
        gpus = Gpus(Path(folder), profile="release")
        gpus.library.fake_cuda_link(ctypes.c_double(LINK))
        module = gpus.module()
        gib = path.stat().st_size / 2**30
        for what, most, prepare, flags in (("warm", 45, warm, 0), ("cold", 20, pages.drop, os.O_DIRECT)):
            sides: dict[str, Callable[[], Any]] = {
                "ingot": lambda: module.load_file(path, 0),
                "plain": lambda flags=flags: read(path, flags),
            }
            found: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(given.rounds + 1):
                for side, work in sides.items():
                    prepare(path)
                    found[side].append(used(work) / gib * 1e3)
            # The first load pins memory.
            ours, plain = (statistics.median(samples[1:]) for samples in found.values())
            goal = Goal(most, 0, of="figure")
            rows.append({"what": what, "figure": ours, "plain": plain, "unit": "ms", "samples": found})
            print(
                f"{what} load: processor time for each GiB {ours:8.3g} ms ({goal}): {goal.met(ours)}; "
                f"plain reads {plain:.3g} ms, ratio {ours / plain:.3g}"
            )
        gpus.release()
    if given.json is not None:
        given.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
