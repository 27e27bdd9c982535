"""Reading less: parts of a 2 GiB file, and all of it in a narrower dtype, each in a fresh process.

`python benches/python/slices.py` prints the table. The sides take turns, and the bytes of all are compared
before a figure is printed. Just before each, 4 GiB are touched and freed, or what is timed is how fast the
host of a virtual machine finds memory.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

import fresh
import ingot
import ingot.torch

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
    # Owed against the peer's mmap and its pread, and the aim.
    owed: tuple[float, float]
    aim: tuple[float, float]


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
        "1/8 of the rows of each matrix", ours_sliced(EIGHTH), theirs_sliced(EIGHTH), (1, 1), (1, 1)
    ),
    "columns": Case(
        "1/8 of the columns of each matrix",
        ours_sliced(WHOLE, EIGHTH),
        theirs_sliced(WHOLE, EIGHTH),
        (1.5, 6),
        (3, 8),
    ),
    "few": Case(
        "64 columns of one matrix", few(ingot.safe_open), few(safetensors.safe_open), (1, 6), (1.5, 8)
    ),
    "convert": Case("all of it, f32 to bf16", ours_converted, theirs_converted, (1.5, 1.5), (2.5, 2.5)),
}
SIDES = ("ingot mmap", "ingot pread", "safetensors mmap", "safetensors pread")


def child(path: Path, case: str, side: str, touched: int) -> dict:
    """One reading, timed."""
    library, backend = side.split()
    read = CASES[case].ours if library == "ingot" else CASES[case].theirs
    junk = torch.ones(touched, dtype=torch.uint8)
    del junk
    before = fresh.resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    tensors = read(path, backend)
    seconds = time.perf_counter() - start
    peak = fresh.resident("VmHWM") - before
    digest = 0
    for name in sorted(tensors):
        digest = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy(), digest)
    return {"seconds": seconds, "peak": peak, "digest": digest}


def make(path: Path) -> None:
    torch.manual_seed(0)
    safetensors.torch.save_file({name: torch.randn(SIZE, SIZE) for name in NAMES}, path)
    path.read_bytes()


def table(path: Path, cases: list[str], rounds: int) -> None:
    program = Path(__file__)
    for case in cases:
        found = fresh.in_turn(
            rounds,
            lambda side, case=case: fresh.run(program, "--child", case, side, "--file", str(path)),
            SIDES,
        )
        digests = {one["digest"] for ones in found.values() for one in ones}
        assert len(digests) == 1, f"{case}: the bytes differ"
        seconds = {side: statistics.median(one["seconds"] for one in ones) for side, ones in found.items()}
        peaks = {side: statistics.median(one["peak"] for one in ones) for side, ones in found.items()}
        print(f"{CASES[case].what}, {rounds} rounds")
        for side in SIDES:
            spread = sorted(one["seconds"] * 1e3 for one in found[side])
            print(
                f"    {side:<18} {seconds[side] * 1e3:8.1f} ms ({spread[0]:.1f} to {spread[-1]:.1f})"
                f", peak {peaks[side] / 2**20:6.0f} MiB"
            )
        for place, backend in enumerate(("mmap", "pread")):
            ratio = seconds[f"safetensors {backend}"] / seconds[f"ingot {backend}"]
            memory = peaks[f"ingot {backend}"] / peaks[f"safetensors {backend}"]
            owed, aim = CASES[case].owed[place], CASES[case].aim[place]
            verdict = "aim met" if ratio >= aim else "owed met" if ratio >= owed else "MISSED"
            print(
                f"    against {backend}: {ratio:.2f} (owed {owed}, aim {aim}): {verdict}; memory {memory:.2f}"
            )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, help="where to put the file of 2 GiB (default: a temporary directory)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--touched", type=int, default=4 << 30, help="bytes to touch and free before each")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.file, *given.child, given.touched)))
        return
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=given.dir) as directory:
        path = given.file or Path(directory) / "matrices.safetensors"
        if not path.exists():
            make(path)
        print(
            f"safetensors {safetensors.__version__}, torch {torch.__version__}; warm, 2 GiB of f32",
            flush=True,
        )
        table(path, [given.only] if given.only else list(CASES), given.rounds)


if __name__ == "__main__":
    main()
