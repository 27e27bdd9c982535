"""Dequantising a model: ingot.rewrite(dequantize=True) against reading the input and writing as many bytes.

`python benches/python/dequantising.py` prints a table for GPTQ, AWQ, FP8, NVFP4 and NF4. Each side is a
fresh process; they take turns. A part of the first weight is compared with NumPy before a figure is
printed. Neither side flushes to the disk.
"""

import statistics
import sys
from pathlib import Path

import numpy

import fresh
import ingot
import options
from turns import in_turn

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from support import quantised

# Required: the speed of the limit, and at most this memory.
OWED_RATIO, OWED_NBYTES = 0.5, 256 << 20
SIDES = ("ingot", "read and write")
CHUNK_NBYTES = 8 << 20
ROWS = 4096
# Models of one matrix of `ROWS` rows, which are repeated.
MODELS = {
    "GPTQ": lambda random: quantised.gptq(random, 4, 32, 128, ROWS),
    "GPTQ, act-order": lambda random: quantised.gptq(random, 4, 32, 128, ROWS, act_order=True),
    "AWQ": lambda random: quantised.awq(random, 32, 128, ROWS),
    "FP8": lambda random: quantised.fp8(random, (ROWS, 4096), (128, 128)),
    "NVFP4": lambda random: quantised.nvfp4(random, ROWS, 256),
    "NF4": lambda random: quantised.bits4(random, (ROWS, 4096), 64, nested=True),
}


def one(source: str, out: str, side: str, nbytes: str) -> dict:
    """Time one side, after the imports. `nbytes` is the size of the result."""

    def written() -> None:
        if side == SIDES[0]:
            ingot.rewrite(source, out, dequantize=True, durable=False)
            return
        left, chunk = int(nbytes), bytes(CHUNK_NBYTES)
        buffer = bytearray(CHUNK_NBYTES)
        with open(source, "rb", buffering=0) as old, open(out, "wb", buffering=0) as new:
            while old.readinto(buffer):
                pass
            while left > 0:
                left -= new.write(chunk[:left])

    return fresh.measured(written)[1]


def make(folder: Path, name: str, nbytes: int) -> tuple[Path, int]:
    """Write a model whose weights take `nbytes` in BF16. Return its path and the size of the weights."""
    model = MODELS[name](numpy.random.default_rng(0))
    [(weight, meant)] = model.weights.items()
    count = max(1, nbytes // (2 * meant.size))
    tensors = {
        f"layers.{number:03}.{part}": values
        for number in range(count)
        for part, values in model.tensors.items()
    }
    path = quantised.Quantised(tensors, {}, model.config).save(folder / name.replace(", ", "-"))
    with ingot.open(path, dequantize="F32") as file:
        found = file.get_slice(f"layers.000.{weight}")[:256]
    assert numpy.array_equal(found, meant[:256]), f"{name}: other values than NumPy's"
    return path, 2 * meant.size * count


def table(folder: Path, nbytes: int, rounds: int) -> None:
    for name in MODELS:
        source, size = make(folder, name, nbytes)

        def once(side: str, source: Path = source, size: int = size) -> dict:
            out = folder / "out.safetensors"
            out.unlink(missing_ok=True)
            return fresh.one(Path(__file__), source, out, side, str(size))

        found = in_turn(rounds, once, SIDES)
        seconds = {side: statistics.median(one["seconds"] for one in ones) for side, ones in found.items()}
        peak = max(one["peak_nbytes"] for one in found[SIDES[0]])
        ratio = seconds[SIDES[1]] / seconds[SIDES[0]]
        met = "met" if ratio >= OWED_RATIO and peak < OWED_NBYTES else "MISSED"
        print(
            f"{name:<16} {size / 1e9:.2f} GB in {seconds[SIDES[0]] * 1e3:7.0f} ms, the limit {ratio:.2f}, "
            f"peak {peak >> 20} MiB; owed {OWED_RATIO} and {OWED_NBYTES >> 20} MiB: {met}"
        )
        source.unlink()


def main() -> None:
    parser = options.parser(__doc__, room="twice the size")
    parser.add_argument("--nbytes", type=float, default=1e9, help="size of the result")
    given = parser.parse_args()
    with options.place(given.dir) as folder:
        table(folder, int(given.nbytes), given.rounds)


if __name__ == "__main__":
    fresh.start(one, main)
