"""Filling existing tensors, compared with loading new ones. Run: `python filling.py [rounds]`.

Prints the times of `load_into` and of `load_file(out=)` as multiples of the time of
`load_file(backend="pread")`, for 20,000 tensors of 64 bfloat16 each. All alternate in one process. Other
processes disturb medians of CPU time less than medians of wall time.
"""

import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import ingot.torch
import load_rows
import same
from turns import in_turn
from workplace import small_tensors

COUNT = 20_000
PEER = 'load_file(backend="pread")'


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.safetensors")
        ingot.torch.save_file(small_tensors(COUNT), path)
        expected = ingot.torch.load_file(path, backend="pread")
        actions = {PEER: lambda: ingot.torch.load_file(path, backend="pread")}
        for name, fill in FILLS.items():
            tensors = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            actions[name] = fill(path, tensors)
            same.tensors(actions[name](), expected)
        seconds = in_turn(rounds, lambda name: timed(actions[name]), actions)
    for rank, clock in enumerate(("CPU", "wall")):
        medians = {name: statistics.median(pair[rank] for pair in seconds[name]) for name in actions}
        for name, median in medians.items():
            print(f"{clock:5} {name:28} {median * 1000:7.2f} ms {median / medians[PEER]:5.2f} x")


def timed(action) -> tuple[float, float]:
    """The seconds of CPU time and of wall time that a call takes."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    result = action()
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    del result
    return seconds


FILLS = {
    "load_into(dict)": load_rows.into_dict,
    "load_into(module)": load_rows.into_module,
    "load_file(out=)": load_rows.into_out,
}

if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 31)
