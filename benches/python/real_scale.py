"""Checkpoints as large as real ones: time, bytes read and memory of the usual first operations.

Their headers are real and their data is sparse (tests/support/sparse_models.py), so they fit on any disk.
Operations that write data run on GPT-2 only, which has half a gigabyte. Every figure is of a fresh process.
As a program: the table.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fresh
import options
import sides

sys.path.append(str(Path(__file__).parents[2] / "tests"))

RANKS = 8


def make(directory: Path) -> None:
    import ingot
    from support import sparse_models

    for name in ("gpt2", "bloom", "experts"):
        (directory / name).mkdir()
    file = directory / "gpt2" / "model.safetensors"
    sparse_models.write_file(file, sparse_models.gpt2())
    # The first edit finds no room, and leaves some.
    ingot.update_metadata(file, {"note": "0" * 20})
    sparse_models.write_checkpoint(directory / "bloom", sparse_models.bloom())
    sparse_models.write_checkpoint(directory / "experts", sparse_models.experts())


def listed(model: Path) -> dict:
    import ingot

    with ingot.safe_open(model, "np") as file:
        return {"tensors": len(file.keys())}


def counted(model: Path) -> dict:
    import ingot

    with ingot.safe_open(model, "np") as file:
        return {"parameters": file.parameter_count()}


def headers(model: Path) -> dict:
    import ingot

    found = ingot.inspect(model, count="stored")
    return {"files": len(found.files_metadata), "tensors": len(found.weight_map)}


def eighths(model: Path) -> dict:
    """Read one rank's share of the rows of every matrix into private memory, and free each."""
    import ingot

    nbytes = 0
    with ingot.safe_open(model, "pt", backend="pread") as file:
        for name in file.keys():  # noqa: SIM118
            info = file.info(name)
            if len(info.shape) == 2 and info.shape[0] % RANKS == 0:
                rows = info.shape[0] // RANKS
                nbytes += file.get_slice(name)[3 * rows : 4 * rows].nbytes
    return {"wanted_nbytes": nbytes}


def split(model: Path) -> dict:
    import ingot

    out = model.parent / "split"
    ingot.split(model, out, "100MB", durable=False)
    files = len(list(out.glob("*.safetensors")))
    shutil.rmtree(out)
    return {"files": files}


def merged(model: Path) -> dict:
    import ingot

    out = model.parent / "merged.safetensors"
    ingot.merge([model], out, durable=False)
    with ingot.safe_open(out, "np") as file:
        tensors = len(file)
    out.unlink()
    return {"tensors": tensors}


def edited(model: Path) -> dict:
    import ingot

    file = model / "model.safetensors"
    ingot.update_metadata(file, {"note": str(time.time_ns())})
    return {"metadata": len(ingot.inspect(file).metadata)}


# For each its function, its models, and whether it runs only once.
ACTIONS: dict[str, tuple[Callable[[Path], dict], tuple[str, ...], bool]] = {
    "open, list the names": (listed, ("gpt2", "bloom", "experts"), False),
    "count parameters": (counted, ("gpt2", "bloom", "experts"), False),
    "all headers": (headers, ("gpt2", "bloom", "experts"), False),
    "read 1/8 of each matrix": (eighths, ("gpt2", "bloom", "experts"), True),
    "split": (split, ("gpt2",), False),
    "merge": (merged, ("gpt2",), False),
    "edit metadata in place, durable": (edited, ("gpt2",), False),
}


def one(action: str, model: str) -> dict:
    import ingot
    import ingot.numpy
    import ingot.torch

    # Import lazy modules now, so that they do not count.
    _ = ingot.inspect, ingot.split, ingot.merge, ingot.update_metadata
    before = _bytes_read()
    found, taken = fresh.measured(lambda: ACTIONS[action][0](Path(model)))
    return taken | {"read_nbytes": _bytes_read() - before, "found": found}


def _bytes_read() -> int:
    """Return the bytes that this process has read by system calls. Nothing is mapped."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def main() -> None:
    import record

    parser = options.parser(__doc__, room="3 GB", figures=True)
    parser.add_argument("--only", metavar="TEXT", help="only what has this in its name")
    given = parser.parse_args()
    with options.place(given.dir) as directory:
        found = record.conditions(directory, 1.0)
        make(directory)
        found["rows"] = []
        for action, (_, models, once) in ACTIONS.items():
            for model in models if given.only is None or given.only in action else ():
                runs = [
                    fresh.one(Path(__file__), action, directory / model)
                    for _ in range(1 if once else given.rounds)
                ]
                row = {
                    "what": action,
                    "model": model,
                    "seconds": statistics.median(run["seconds"] for run in runs),
                    "read_nbytes": max(run["read_nbytes"] for run in runs),
                    "peak_mib": sides.peak_mib(runs),
                    "found": runs[-1]["found"],
                    "rounds": len(runs),
                }
                found["rows"].append(row)
                print(
                    f"{model:8} {action:31} {row['seconds']:9.4f} s, {row['read_nbytes']:15,} bytes read, "
                    f"{row['peak_mib']:7.1f} MiB, {row['found']}",
                    flush=True,
                )
    if given.json:
        record.keep(found, given.json)


if __name__ == "__main__":
    fresh.start(one, main)
