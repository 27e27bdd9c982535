"""The host's side of a load onto a GPU: processor time for each GiB.

There is no GPU: on the simulated driver of the tests, each copy takes the time of a link of 55 GB/s and
moves no bytes. So the figures measure reads into pinned memory and calls of the driver. Files are in the page
cache (warm) or not (cold).
"""

import ctypes
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.devices.simulator import Gpus

import ingot.numpy
import options
from goal import Goal

LINK = 55e9


def file_of(folder: Path, mib: int) -> Path:
    """Write a file of tensors of 64 MiB."""
    random = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    path = folder / "model.safetensors"
    ingot.numpy.save_file({f"layer.{number:05}": random for number in range(max(1, mib // 64))}, path)
    return path


def forget(path: Path) -> None:
    """Drop the pages of a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def seconds(module: Any, path: Path) -> float:
    """Return the processor time of a load."""
    begun = resource.getrusage(resource.RUSAGE_SELF)
    loaded = module.load_file(path, 0)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    del loaded
    return ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime


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
        for what, most, prepare in (("warm", 45, None), ("cold", 20, forget)):
            found = []
            for _ in range(given.rounds + 1):
                if prepare is not None:
                    prepare(path)
                found.append(seconds(module, path) / gib * 1e3)
            # The first load pins memory.
            figure, goal = min(found[1:]), Goal(most, 0, of="figure")
            rows.append({"what": what, "figure": figure, "unit": "ms", "samples": found[1:]})
            print(f"{what} load: processor time for each GiB {figure:8.3g} ms ({goal}): {goal.met(figure)}")
        gpus.release()
    if given.json is not None:
        given.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
