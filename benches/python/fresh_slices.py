"""Reading less: parts of a 2 GiB file, and all of it in a narrower dtype, each in a fresh process.

`python benches/python/fresh_slices.py` prints the table. The sides take turns, and the bytes of all are
compared before a figure is printed. Just before each, 2 GiB are touched and freed, in small pages and in huge
ones, and the file is read. Otherwise the time would depend on how fast the host of a virtual machine finds
memory, and on how much of the page cache it took back.

Then 20,000 small tensors with each option, against all of them as they are: seconds, and how often the file
is read; the bytes that are read for a part; and a slice of columns as a view, and copied out.

Last, columns into memory that is there, by as many processes at once as there are cores, and by twice as
many: `--only ranks` prints those ratios alone.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        # Rows are views of the mapping, not yet read; columns are copies.
        is_view = backend == "mmap" and index[0] != WHOLE
        return {name: owned(part, backend) if is_view else part for name, part in parts.items()}

    return read


def theirs_sliced(*index: slice) -> Callable[[Path, str], Tensors]:
    def read(path: Path, backend: str) -> Tensors:
        with safetensors.safe_open(path, framework="pt", backend=backend) as file:
            return {name: owned(file.get_slice(name)[index], backend) for name in NAMES}

    return read


def owned(tensor: torch.Tensor, backend: str) -> torch.Tensor:
    """With mmap the peer returns a view that is not yet read; with pread a copy."""
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


def ours_into(path: Path, backend: str) -> Tensors:
    return ingot.torch.load_file(path, backend=backend, out=empty())


def theirs_into(path: Path, backend: str) -> Tensors:
    tensors = empty()
    with safetensors.safe_open(path, framework="pt", backend=backend) as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
    return tensors


def empty() -> Tensors:
    return {name: torch.empty(SIZE, SIZE) for name in NAMES}


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
        {"mmap": Goal(2, 3), "pread": Goal(8, 12)},
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
    "into": Case("all of it, into memory that is there", ours_into, theirs_into, {}),
}
#: Bytes that a load may take beside its tensors.
BESIDE = Goal(64 << 20, 32 << 20, of="figure")
#: 20,000 small tensors: the arguments of a load, and the allowed share of the time of a whole load.
MANY = 20_000
LESS: dict[str, tuple[Callable[[list[str]], dict], Goal | None]] = {
    "whole": (lambda names: {}, None),
    "out": (
        lambda names: {"out": {name: torch.empty((8, 8), dtype=torch.bfloat16) for name in names}},
        Goal(1.5, 1.1, of="figure"),
    ),
    "dtype": (lambda names: {"dtype": torch.float32}, Goal(2, 1.3, of="figure")),
    "halves": (lambda names: {"slices": dict.fromkeys(names, (WHOLE, slice(4)))}, None),
}
#: Of the bytes that are needed, those that may be read for them.
READ = {"rows": ((EIGHTH,), 1.02), "columns": ((WHOLE, EIGHTH), 1.5)}
#: Columns of ranks: bytes of a run, runs in a row, tensors, and bytes of a rank.
RUNS, PARTS, TABLES, RANK_NBYTES = (512, 1024, 2048, 4096), 4, 16, 48 << 20
SIDES = ("ingot mmap", "ingot pread", "safetensors mmap", "safetensors pread")


def process_io(field: str) -> int:
    """Reads, ``syscr``, or the bytes of them, ``rchar``, of this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(field + ":"))
    return int(found.split()[1])


def one_of_many(path: str, what: str) -> dict:
    """A load of many small tensors, and how often it reads."""
    with ingot.safe_open(path, "pt") as file:
        options = LESS[what][0](file.keys())
    before = process_io("syscr")
    tensors, found = fresh.measured(lambda: ingot.torch.load_file(path, backend="pread", **options))
    # Asking costs two reads itself.
    found["reads"] = process_io("syscr") - before
    with ingot.safe_open(path, "pt") as file:
        for name in file.keys()[::100]:
            whole = file.get_tensor(name)
            expected = whole[:, :4] if what == "halves" else whole
            assert torch.equal(tensors[name], expected.to(tensors[name].dtype)), f"{what}: bytes differ"
    return found


def one_part(path: str, what: str) -> dict:
    """The bytes that are read for a part of a tensor, and those that it has."""
    with ingot.safe_open(path, "pt", backend="pread") as file:
        part = file.get_slice("large")
        before = process_io("rchar")
        nbytes = part[READ[what][0]].nbytes
        return {"read": process_io("rchar") - before, "needed": nbytes}


def one_rank(path: str, what: str) -> dict:
    """Loads of one rank's columns in three seconds from a given time on: of all ranks in the same seconds."""
    library, rank, run_nbytes, begin = what.split()
    width = int(run_nbytes) // 2
    index = (WHOLE, slice(width * (int(rank) % PARTS), width * (int(rank) % PARTS + 1)))
    shape = RANK_NBYTES // int(run_nbytes) // TABLES, width
    out = {f"{number}": torch.zeros(shape, dtype=torch.bfloat16) for number in range(TABLES)}
    parts = dict.fromkeys(out, index)

    def ours() -> None:
        ingot.torch.load_file(path, out=out, slices=parts)

    def theirs() -> None:
        with safetensors.safe_open(path, framework="pt") as file:
            for name, tensor in out.items():
                tensor.copy_(file.get_slice(name)[index])

    torch.set_num_threads(1)
    load = ours if library == "ingot" else theirs
    load()
    digest = same.digest(out)
    time.sleep(max(0, float(begin) - time.time()))
    end, count, before = time.perf_counter() + 3, 0, time.process_time()
    while time.perf_counter() < end:
        load()
        count += 1
    return {"digest": digest, "loads": count, "cpu": (time.process_time() - before) / count}


def show_ranks(directory: Path, rounds: int) -> dict[str, dict]:
    shown = {}
    cores = len(os.sched_getaffinity(0))
    for run_nbytes in RUNS:
        path = directory / "columns.safetensors"
        shape = RANK_NBYTES // run_nbytes // TABLES, PARTS * run_nbytes // 2
        random = (torch.randint(1 << 15, shape, dtype=torch.int16) for _ in range(TABLES))
        tables = {f"{number}": table.view(torch.bfloat16) for number, table in enumerate(random)}
        safetensors.torch.save_file(tables, path)
        for ranks in (cores, 2 * cores):

            def load(
                library: str, path: Path = path, run_nbytes: int = run_nbytes, ranks: int = ranks
            ) -> dict:
                begin = time.time() + 4 + 2 * ranks / cores
                with ThreadPoolExecutor(ranks) as pool:
                    whats = (f"{library} {rank} {run_nbytes} {begin}" for rank in range(ranks))
                    found = list(
                        pool.map(lambda what: fresh.one(Path(__file__), path, "rank", what, 0), whats)
                    )
                return {
                    "digest": [run["digest"] for run in found],
                    "loads": sum(run["loads"] for run in found),
                    "cpu": statistics.mean(run["cpu"] for run in found),
                }

            runs = in_turn(rounds, load, ("ingot", "safetensors"))
            ours, theirs = runs["ingot"], runs["safetensors"]
            assert all(run["digest"] == ours[0]["digest"] for run in ours + theirs), "columns: bytes differ"
            middle = lambda runs, key: statistics.median(run[key] for run in runs)  # noqa: E731
            ratio = middle(ours, "loads") / middle(theirs, "loads")
            cpu = middle(theirs, "cpu") / middle(ours, "cpu")
            shown[f"{run_nbytes} bytes, {ranks} ranks"] = {"ratio": ratio, "cpu": cpu}
            goal = Goal(0.95, 1.3)
            print(
                f"columns in runs of {run_nbytes:>4} bytes, {ranks} ranks on {cores} cores: {ratio:.2f} x "
                f"safetensors ({goal}): {goal.met(ratio)}; by CPU time {cpu:.2f} x",
                flush=True,
            )
    return shown


def views(path: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of `get_slice(name)[:, :512]`, and of copying that out, by either library, in turn."""
    found: dict[str, list[tuple[float, float]]] = {"ingot": [], "safetensors": []}
    openers = {"ingot": ingot.safe_open, "safetensors": safetensors.safe_open}
    copies = []
    for _ in range(max(2, rounds) * 4):
        for library, times in found.items():
            with openers[library](path, framework="pt") as file:
                begun = time.perf_counter()
                view = file.get_slice("table")[:, :512]
                viewed = time.perf_counter()
                copies.append(view.clone(memory_format=torch.contiguous_format))
                times.append((viewed - begun, time.perf_counter() - begun))
        assert torch.equal(*copies), "views: bytes differ"
        copies.clear()
    # The first round touches the pages.
    return {
        library: (statistics.median(a for a, _ in times[1:]), statistics.median(b for _, b in times[1:]))
        for library, times in found.items()
    }


def show_many(directory: Path, rounds: int) -> dict[str, dict]:
    path = directory / "small.safetensors"
    values = torch.randn(MANY, 8, 8).to(torch.bfloat16)
    safetensors.torch.save_file({f"layers.{n}.weight": values[n].clone() for n in range(MANY)}, path)
    runs = in_turn(rounds, lambda what: fresh.one(Path(__file__), path, "many", what, 0), LESS)
    seconds = {what: statistics.median(run["seconds"] for run in of) for what, of in runs.items()}
    reads = {what: statistics.median(run["reads"] for run in of) for what, of in runs.items()}
    print(f"{MANY:,} tensors of 128 bytes, pread, {rounds} rounds")
    for what, (_, goal) in LESS.items():
        ratio = seconds[what] / seconds["whole"]
        owed = "" if goal is None else f" ({goal}): {goal.met(ratio)}"
        allowed = "ok" if reads[what] <= 4 * reads["whole"] + 20 else "MISSED"
        print(
            f"    {what:<18} {seconds[what] * 1e3:8.1f} ms, {ratio:.2f} of the whole{owed}; "
            f"{reads[what]:.0f} reads ({allowed})",
            flush=True,
        )
    return {what: {"seconds": seconds[what], "reads": reads[what]} for what in LESS}


def show_parts(directory: Path, rounds: int) -> dict[str, object]:
    path = directory / "large.safetensors"
    torch.manual_seed(0)
    large = torch.randn(8 * SIZE, SIZE)
    safetensors.torch.save_file({"large": large}, path)
    shown: dict[str, object] = {}
    for what, (_, owed) in READ.items():
        found = fresh.one(Path(__file__), path, "part", what, 0)
        ratio = found["read"] / found["needed"]
        shown[what] = {"bytes_read_for_each": ratio}
        met = "ok" if ratio <= owed else "MISSED"
        print(f"1/8 of the {what}, pread: {ratio:.3f} bytes read for each needed (owed {owed}): {met}")
    path = directory / "table.safetensors"
    safetensors.torch.save_file({"table": torch.randn(32_000, 1024).to(torch.bfloat16)}, path)
    times = views(path, rounds)
    for number, what in enumerate(["as a view", "copied out"]):
        ours, theirs = times["ingot"][number], times["safetensors"][number]
        shown[what] = {"ingot": ours, "safetensors": theirs}
        goal = Goal(1, 1.2)
        print(
            f"512 of 1,024 columns {what}: {ours * 1e3:.3f} ms, safetensors {theirs * 1e3:.3f} ms: "
            f"{theirs / ours:.2f} ({goal}): {goal.met(theirs / ours)}"
        )
    return shown


def one(path: str, case: str, side: str, touched: str) -> dict:
    """One reading, timed."""
    if case == "many":
        return one_of_many(path, side)
    if case == "rank":
        return one_rank(path, side)
    if case == "part":
        return one_part(path, side)
    library, backend = side.split()
    read = CASES[case].ours if library == "ingot" else CASES[case].theirs
    pages.warm(path, int(touched))
    tensors, found = fresh.measured(lambda: read(Path(path), backend))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return found | {"digest": same.digest(tensors), "beside_nbytes": found["peak_nbytes"] - nbytes}


def make(path: Path) -> None:
    torch.manual_seed(0)
    safetensors.torch.save_file({name: torch.randn(SIZE, SIZE) for name in NAMES}, path)
    path.read_bytes()


def show(case: Case, found: dict[str, list[dict]], rounds: int) -> dict[str, dict]:
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
    beside = max(run["beside_nbytes"] for run in found["ingot pread"])
    print(f"    beside the tensors at most {beside / 2**20:.0f} MiB (owed 64, aim 32): {BESIDE.met(beside)}")
    for backend, goal in case.goals.items():
        ratio = seconds[f"safetensors {backend}"] / seconds[f"ingot {backend}"]
        memory = peaks[f"ingot {backend}"] / peaks[f"safetensors {backend}"]
        print(
            f"    against {backend}: {ratio:.2f} ({goal}): {goal.met(ratio)}; memory {memory:.2f}", flush=True
        )
    return {side: {"seconds": seconds[side], "peak_mib": round(peaks[side] / 2**20)} for side in found}


def main() -> None:
    import record

    parser = options.parser(__doc__, room="2 GiB", figures=True)
    parser.add_argument("--only", choices=(*CASES, "many", "parts", "ranks"))
    parser.add_argument("--touched", type=int, default=2 << 30, help="bytes to touch and free before each")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    with options.place(given.dir) as directory:
        print(
            f"safetensors {safetensors.__version__}, torch {torch.__version__}; warm, 2 GiB of f32",
            flush=True,
        )
        figures = record.conditions(directory, 1)
        if given.only in (None, "many"):
            # Loads of some 30 ms: more of them, for a median that stays.
            figures["many"] = show_many(directory, 5 * given.rounds)
        if given.only in (None, "parts"):
            figures["parts"] = show_parts(directory, given.rounds)
        if given.only in (None, "ranks"):
            figures["ranks"] = show_ranks(directory, given.rounds)
        wanted = [name for name in CASES if given.only in (None, name)]
        path = given.file or directory / "matrices.safetensors"
        if wanted and not path.exists():
            make(path)
        for name in wanted:

            def run(side: str, name: str = name) -> dict:
                return fresh.one(Path(__file__), path, name, side, given.touched)

            figures[name] = show(CASES[name], in_turn(given.rounds, run, SIDES), given.rounds)
    if given.json:
        record.keep(figures, given.json)


if __name__ == "__main__":
    fresh.start(one, main)
