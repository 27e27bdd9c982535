"""The command `ingot` as a process of its own: the time from its start to its end.

`python benches/python/cli.py` prints the table: a summary of 20,000 tensors, the names of 500,000, the
statistics of 2 GiB against an obvious pass of NumPy over the same mapped file, and the differences of two
files of 1 GiB against the greatest absolute one alone by NumPy. What a command prints is checked before it is
timed, and the sides take turns.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

import fresh
import ingot
import ingot.numpy
import options
from turns import in_turn

GIB = 1 << 30
TENSOR = 64 << 20
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}


def named(path: Path, count: int) -> Path:
    """A file of `count` tensors of one number each, with the names of a transformer."""
    parts = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight", "norm.bias")
    one = {"dtype": "F32", "shape": [1], "data": bytes(4)}
    names = (f"model.layers.{at // len(parts)}.attention.{parts[at % len(parts)]}" for at in range(count))
    ingot.serialize_file(dict.fromkeys(names, one), path, durable=False)
    return path


def filled(path: Path, nbytes: int, dtype: str = "F32", seed: int = 0) -> Path:
    """A file of `nbytes` of normally distributed values, in the page cache."""
    random, width = np.random.default_rng(seed), DTYPES[dtype].itemsize
    sizes = {f"layers.{at}.weight": TENSOR for at in range(nbytes // TENSOR)}
    if nbytes % TENSOR:
        sizes["rest"] = nbytes % TENSOR
    with ingot.Writer(
        path, {name: (dtype, [size // width]) for name, size in sizes.items()}, durable=False, overwrite=True
    ) as writer:
        for name, size in sizes.items():
            values = random.standard_normal(size // width, dtype=np.float32)
            writer.write(name, values.astype(DTYPES[dtype], copy=False))
        writer.commit()
    path.read_bytes()
    return path


def printed(*arguments: object) -> str:
    """Run the command, check that it succeeds, and return its output."""
    return fresh.printed(sys.executable, "-m", "ingot", *arguments)


def naive(path: Path) -> dict[str, list[float]]:
    """Return the results of `stats`, computed with NumPy's functions one after the other."""
    found = {}
    with ingot.safe_open(path, "np") as file:
        for name, array in file.items():
            wide = {"dtype": np.float64}
            zeros, nans, infinities = (
                int(np.count_nonzero(what)) for what in (array == 0, np.isnan(array), np.isinf(array))
            )
            found[name] = [
                *(
                    float(array.min()),
                    float(array.max()),
                    float(array.mean(**wide)),
                    float(array.std(**wide)),
                ),
                *(zeros, nans, infinities),
            ]
    return found


def greatest(one: Path, two: Path) -> dict[str, float]:
    """Return the greatest absolute difference of each tensor, computed with NumPy."""
    with ingot.safe_open(one, "np") as ours, ingot.safe_open(two, "np") as theirs:
        return {name: float(np.abs(array - theirs[name]).max()) for name, array in ours.items()}


def taken(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def told(what: str, seconds: list[float], owed: float) -> None:
    median = statistics.median(seconds)
    verdict = "met" if median <= owed else "MISSED"
    spread = f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}"
    print(f"{what:<44} {median * 1e3:8.0f} ms ({spread}), owed {owed * 1e3:.0f}: {verdict}", flush=True)


def listing(folder: Path, count: int, rounds: int, owed: float, *command: str) -> None:
    path = named(folder / f"named-{count}.safetensors", count)
    out = printed(*command, path)
    lines = out.splitlines()
    assert f"{count:,}" in out if not command else len(lines) == count, "the command printed something else"
    what = f"ingot {' '.join(command)}{' ' if command else ''}PATH, {count:,} tensors"
    told(what, [taken(lambda: printed(*command, path)) for _ in range(rounds)], owed)


def throughput(folder: Path, nbytes: int, rounds: int) -> None:
    path = filled(folder / "filled.safetensors", nbytes)
    fields = ("min", "max", "mean", "std", "zeros", "nans", "infinities")
    rows = json.loads(printed("stats", "--all", "--json", path))["tensors"]
    for name, expected in naive(path).items():
        (row,) = (row for row in rows if row["name"] == name)
        assert np.allclose([row[field] for field in fields], expected, rtol=1e-6, atol=1e-9), name
    actions = {"ingot stats --all": lambda: printed("stats", "--all", path), "NumPy": lambda: naive(path)}
    sides = in_turn(rounds, lambda side: taken(actions[side]), actions)
    rates = {side: nbytes / statistics.median(seconds) / 1e9 for side, seconds in sides.items()}
    for side, rate in rates.items():
        spread = f"{nbytes / max(sides[side]) / 1e9:.2f} to {nbytes / min(sides[side]) / 1e9:.2f}"
        print(f"{side + f', {nbytes / GIB:.2f} GiB of F32':<44} {rate:8.2f} GB/s ({spread})")
    ours, theirs = rates.values()
    verdict = "met" if ours >= 1.5 and theirs <= ours / 2 else "MISSED"
    print(f"{'':<44} owed 1.5 GB/s, and twice as fast as NumPy: {ours / theirs:.1f} times: {verdict}")


def difference(folder: Path, nbytes: int, rounds: int, dtype: str) -> None:
    files = [filled(folder / f"{seed}-{dtype}.safetensors", nbytes, dtype, seed) for seed in (1, 2)]
    rows = json.loads(differing("--json", *files))["values"]
    # NumPy rounds each difference to the dtype; the greatest stays the greatest.
    found = {row["name"]: float(np.asarray(row["max_abs"]).astype(DTYPES[dtype])) for row in rows}
    assert found == greatest(*files), "other differences than NumPy's"
    copy = Path(shutil.copy(files[0], folder / f"copy-{dtype}.safetensors"))
    assert printed("diff", "--values", files[0], copy) == "", "a copy is not equal"
    actions = {
        "ingot diff --values": lambda: differing(*files),
        "ingot diff --values of a copy": lambda: printed("diff", "--values", files[0], copy),
        "NumPy": lambda: greatest(*files),
    }
    sides = in_turn(rounds, lambda side: taken(actions[side]), actions)
    owed = 3 * statistics.median(sides["NumPy"])
    for side, seconds in sides.items():
        told(f"{side}, 2 x {nbytes / GIB:.2f} GiB of {dtype}", seconds, owed)
    for file in (*files, copy):
        file.unlink()


def differing(*arguments: object) -> str:
    """Return the output of `diff --values` for files that differ."""
    line = [sys.executable, "-m", "ingot", "diff", "--values", *map(str, arguments)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1, "the files are equal, or cannot be compared"
    return done.stdout


def main() -> None:
    given = options.parser(__doc__, 9, room="5 GB", scaled=True).parse_args()
    with options.place(given.dir) as folder:
        listing(folder, round(20_000 * given.scale), given.rounds, 0.150)
        listing(folder, round(500_000 * given.scale), given.rounds, 2.0, "ls")
        throughput(folder, round(2 * GIB * given.scale) // 4 * 4, given.rounds)
        for dtype in DTYPES:
            difference(folder, round(GIB * given.scale) // 4 * 4, given.rounds, dtype)


if __name__ == "__main__":
    main()
