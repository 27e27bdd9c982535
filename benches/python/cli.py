"""The command `ingot` as a process of its own: the time from its start to its end.

`python benches/python/cli.py` prints the table: a summary of 20,000 tensors, the names of 500,000, and the
statistics of 2 GiB against an obvious pass of NumPy over the same mapped file. What a command prints is
checked before it is timed, and the sides take turns.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fresh
import ingot
import ingot.numpy
import options
from turns import in_turn

GIB = 1 << 30
TENSOR = 64 << 20


def named(path: Path, count: int) -> Path:
    """A file of `count` tensors of one number each, with the names of a transformer."""
    parts = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight", "norm.bias")
    one = {"dtype": "F32", "shape": [1], "data": bytes(4)}
    names = (f"model.layers.{at // len(parts)}.attention.{parts[at % len(parts)]}" for at in range(count))
    ingot.serialize_file(dict.fromkeys(names, one), path, durable=False)
    return path


def filled(path: Path, nbytes: int) -> Path:
    """A file of `nbytes` of normally distributed F32, in the page cache."""
    random = np.random.default_rng(0)
    sizes = {f"layers.{at}.weight": TENSOR for at in range(nbytes // TENSOR)}
    if nbytes % TENSOR:
        sizes["rest"] = nbytes % TENSOR
    with ingot.Writer(
        path, {name: ("F32", [size // 4]) for name, size in sizes.items()}, durable=False
    ) as writer:
        for name, size in sizes.items():
            writer.write(name, random.standard_normal(size // 4, dtype=np.float32))
        writer.commit()
    path.read_bytes()
    return path


def printed(*arguments: object) -> str:
    """What the command prints, which must end well."""
    return fresh.printed(sys.executable, "-m", "ingot", *arguments)


def naive(path: Path) -> dict[str, list[float]]:
    """What `stats` says, in the obvious way: one function of NumPy after the other over each tensor."""
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


def main() -> None:
    given = options.parser(__doc__, 9, room="2 GB", scaled=True).parse_args()
    with options.place(given.dir) as folder:
        listing(folder, round(20_000 * given.scale), given.rounds, 0.150)
        listing(folder, round(500_000 * given.scale), given.rounds, 2.0, "ls")
        throughput(folder, round(2 * GIB * given.scale) // 4 * 4, given.rounds)


if __name__ == "__main__":
    main()
