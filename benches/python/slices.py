"""Reading less: parts of a 2 GiB file, and all of it in a narrower dtype, each in a fresh process.

`python benches/python/slices.py` prints the table. The sides take turns, and the bytes of all are compared
before a figure is printed. Just before each, 4 GiB are touched and freed, or what is timed is how fast the
host of a virtual machine finds memory.
"""

import argparse
import mmap
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

import fresh
import ingot
import ingot.torch
import options
import pages
import same
from goal import Goal
from turns import in_turn

MATRICES, SIZE = 32, 4096
EIGHTH = slice(SIZE // 8, SIZE // 4)
WHOLE = slice(None)
NAMES = [f"layers.{number:02}.weight" for number in range(MATRICES)]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is read, by ingot and by its peer, each given a file and a backend."""

    what: str
    ours: Callable[[Path, str], Tensors]
    theirs: Callable[[Path, str], Tensors]
    # Against the peer's mmap and its pread.
    goals: dict[str, Goal]


def ours_sliced(*index: slice) -> Callable[[Path, str], Tensors]:
    def read(path: Path, backend: str) -> Tensors:
        parts = ingot.torch.load_file(path, backend=backend, slices=dict.fromkeys(NAMES, index))
        # Rows are views of the mapping, of which nothing has been read; columns are copies.
        is_view = backend == "mmap" and index[0] != WHOLE
        return {name: owned(part, backend) if is_view else part for name, part in parts.items()}

    return read


def theirs_sliced(*index: slice) -> Callable[[Path, str], Tensors]:
    def read(path: Path, backend: str) -> Tensors:
        with safetensors.safe_open(path, framework="pt", backend=backend) as file:
            return {name: owned(file.get_slice(name)[index], backend) for name in NAMES}

    return read


def owned(tensor: torch.Tensor, backend: str) -> torch.Tensor:
    """With mmap the peer gives a view, of which nothing has been read; with pread a copy."""
    return tensor.clone(memory_format=torch.contiguous_format) if backend == "mmap" else tensor


def few(opener: Callable[..., object]) -> Callable[[Path, str], Tensors]:
    def read(path: Path, backend: str) -> Tensors:
        with opener(path, framework="pt", backend=backend) as file:
            part = file.get_slice(NAMES[0])[:, 100:164]
            return {"part": part if part.is_contiguous() else owned(part, backend)}

    return read


def ours_converted(path: Path, backend: str) -> Tensors:
    return ingot.torch.load_file(path, backend=backend, dtype=torch.bfloat16)


def theirs_converted(path: Path, backend: str) -> Tensors:
    tensors = {}
    with safetensors.safe_open(path, framework="pt", backend=backend) as file:
        for name in NAMES:
            tensors[name] = file.get_tensor(name)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


CASES = {
    "rows": Case(
        "1/8 of the rows of each matrix",
        ours_sliced(EIGHTH),
        theirs_sliced(EIGHTH),
        {"mmap": Goal(1, 1), "pread": Goal(1, 1)},
    ),
    "columns": Case(
        "1/8 of the columns of each matrix",
        ours_sliced(WHOLE, EIGHTH),
        theirs_sliced(WHOLE, EIGHTH),
        {"mmap": Goal(1.5, 3), "pread": Goal(6, 8)},
    ),
    "few": Case(
        "64 columns of one matrix",
        few(ingot.safe_open),
        few(safetensors.safe_open),
        {"mmap": Goal(1, 1.5), "pread": Goal(6, 8)},
    ),
    "convert": Case(
        "all of it, f32 to bf16",
        ours_converted,
        theirs_converted,
        {"mmap": Goal(1.5, 2.5), "pread": Goal(1.5, 2.5)},
    ),
}
SIDES = ("ingot mmap", "ingot pread", "safetensors mmap", "safetensors pread")


def one(path: str, case: str, side: str, touched: str) -> dict:
    """One reading, timed."""
    library, backend = side.split()
    read = CASES[case].ours if library == "ingot" else CASES[case].theirs
    pages.touch(int(touched), [mmap.MADV_NOHUGEPAGE])
    tensors, found = fresh.measured(lambda: read(Path(path), backend))
    return found | {"digest": same.digest(tensors)}


def make(path: Path) -> None:
    torch.manual_seed(0)
    safetensors.torch.save_file({name: torch.randn(SIZE, SIZE) for name in NAMES}, path)
    path.read_bytes()


def show(case: Case, found: dict[str, list[dict]], rounds: int) -> None:
    assert len({run["digest"] for runs in found.values() for run in runs}) == 1, f"{case.what}: bytes differ"
    seconds = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    peaks = {side: statistics.median(run["peak_nbytes"] for run in runs) for side, runs in found.items()}
    print(f"{case.what}, {rounds} rounds")
    for side, runs in found.items():
        spread = sorted(run["seconds"] * 1e3 for run in runs)
        print(
            f"    {side:<18} {seconds[side] * 1e3:8.1f} ms ({spread[0]:.1f} to {spread[-1]:.1f})"
            f", peak {peaks[side] / 2**20:6.0f} MiB"
        )
    for backend, goal in case.goals.items():
        ratio = seconds[f"safetensors {backend}"] / seconds[f"ingot {backend}"]
        memory = peaks[f"ingot {backend}"] / peaks[f"safetensors {backend}"]
        print(
            f"    against {backend}: {ratio:.2f} ({goal}): {goal.met(ratio)}; memory {memory:.2f}", flush=True
        )


def main() -> None:
    parser = options.parser(__doc__, room="2 GiB")
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--touched", type=int, default=4 << 30, help="bytes to touch and free before each")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    with options.place(given.dir) as directory:
        path = given.file or directory / "matrices.safetensors"
        if not path.exists():
            make(path)
        print(
            f"safetensors {safetensors.__version__}, torch {torch.__version__}; warm, 2 GiB of f32",
            flush=True,
        )
        for name in [given.only] if given.only else CASES:

            def run(side: str, name: str = name) -> dict:
                return fresh.one(Path(__file__), path, name, side, given.touched)

            show(CASES[name], in_turn(given.rounds, run, SIDES), given.rounds)


if __name__ == "__main__":
    fresh.start(one, main)
