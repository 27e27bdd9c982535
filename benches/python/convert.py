"""Converting a PyTorch checkpoint: ingot.convert against torch.load and safetensors' save_file.

`python benches/python/convert.py` prints the table. Each conversion is a fresh process; they take turns, and
the files are compared byte by byte before a figure is printed. Neither flushes to the disk. ingot compares
every tensor after the write by default. The peer cannot do that, and ingot's time includes it.
"""

import statistics
from pathlib import Path

import safetensors.torch
import torch

import fresh
import ingot
import ingot._convert.sources.torch  # Imported here, so that the first conversion does not time the import.
import options
from turns import in_turn

# Required: the speed of the peer, and at most this memory beyond one tensor.
OWED_RATIO, OWED_NBYTES = 1.0, 300 << 20
TENSORS = 32
SIDES = ("ingot", "ingot, verified", "torch + safetensors")


def one(source: str, out: str, side: str) -> dict:
    """Time one conversion, after the imports."""

    def converted() -> None:
        if side == SIDES[2]:
            tensors = torch.load(source, weights_only=True)
            safetensors.torch.save_file(tensors, out, metadata={"format": "pt"})
        else:
            ingot.convert(source, out, verify=side == SIDES[1], durable=False, overwrite=True)

    return fresh.measured(converted)[1]


def make(path: Path, nbytes: int) -> int:
    """Write a checkpoint of `nbytes`, and return the size of its largest tensor."""
    torch.manual_seed(0)
    size = nbytes // TENSORS // 4 // 1024
    state = {f"layers.{number:02}.weight": torch.randn(size, 1024) for number in range(TENSORS)}
    torch.save(state, path)
    return size * 1024 * 4


def table(folder: Path, nbytes: int, rounds: int) -> None:
    source = folder / "pytorch_model.bin"
    largest = make(source, nbytes)

    def once(side: str) -> dict:
        out = folder / f"{SIDES.index(side)}.safetensors"
        out.unlink(missing_ok=True)
        return fresh.one(Path(__file__), source, out, side)

    found = in_turn(rounds, once, SIDES)
    files = [(folder / f"{number}.safetensors").read_bytes() for number in range(len(SIDES))]
    assert files[0] == files[1] == files[2], "the files differ"
    print(f"{nbytes / 1e9:.2f} GB in {TENSORS} tensors, {rounds} rounds, warm, nothing flushed")
    medians = {side: statistics.median(one["seconds"] for one in ones) for side, ones in found.items()}
    for side, ones in found.items():
        spread = sorted(one["seconds"] * 1e3 for one in ones)
        beyond = statistics.median(one["peak_nbytes"] for one in ones) - largest
        ratio = medians[SIDES[2]] / medians[side]
        print(
            f"    {side:<20} {medians[side] * 1e3:8.1f} ms ({spread[0]:.1f} to {spread[-1]:.1f}), "
            f"ratio {ratio:.2f}, peak {beyond / 2**20:6.0f} MiB beyond a tensor of {largest / 2**20:.0f} MiB"
        )
    peak = max(one["peak_nbytes"] for one in found[SIDES[0]] + found[SIDES[1]]) - largest
    print(f"    owed: memory below {OWED_NBYTES >> 20} MiB: {'met' if peak < OWED_NBYTES else 'MISSED'}")
    ratio = medians[SIDES[2]] / medians[SIDES[1]]
    print(f"    owed: ratio {OWED_RATIO}, verified: {'met' if ratio >= OWED_RATIO else 'MISSED'}")


def main() -> None:
    parser = options.parser(__doc__, room="four times the size")
    parser.add_argument("--nbytes", type=float, default=2e9, help="size of the checkpoint")
    parser.add_argument("--folder", dest="dir", type=Path, help="another name of --dir")
    given = parser.parse_args()
    with options.place(given.dir) as folder:
        table(folder, int(given.nbytes), given.rounds)


if __name__ == "__main__":
    fresh.start(one, main)
