"""Hashing files and verifying them, against reading them and against hashlib.

Not part of the table of `main.py`: no peer does any of this. `python benches/python/integrity.py` prints it.
"""

import argparse
import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy as np

import fresh
import fresh_loads
import ingot
import ingot.numpy
import options
import record
from duel import Duel, Samples
from turns import in_turn


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, room="three times the size")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file")
    return parser.parse_args()


def read_in_pieces(path: Path) -> int:
    """Read a file and discard the bytes, in the fastest way for one thread of Python."""
    # At the start of a page, as the file's bytes are: not all kernels copy as fast to other places.
    buffer = mmap(-1, 1 << 20)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def openssl(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def equal(ours: object, theirs: object) -> None:
    assert ours == theirs, f"{ours} and {theirs} differ"


def vouched(ours: object, _theirs: object) -> None:
    assert ours.ok, str(ours)


@dataclass(frozen=True)
class Row:
    """A timed action, the action that it is compared with, and the required ratio."""

    what: str
    beside: str
    samples: Callable[[int], Samples]
    goal: str = ""


IN_PIECES = "reading it in pieces and throwing them away"
SPEED, TIME = "≥ 0.5, aim 0.9", "≥ 1/1.4 = 0.71, aim 1/1.1 = 0.91"


def verifying(path: Path, what: str, goal: str = "") -> Row:
    duel = Duel(lambda: ingot.verify(path), lambda: read_in_pieces(path), vouched)
    return Row(what, IN_PIECES, duel.run, goal)


def verifying_as_whole(path: Path) -> Row:
    duel = Duel(lambda: ingot.verify(path), path.read_bytes, vouched)
    return Row("verify, BLAKE3", "Path.read_bytes", duel.run, SPEED)


def hashing(path: Path) -> Row:
    duel = Duel(lambda: ingot.hash(path), lambda: openssl(path), equal)
    return Row("hash, SHA-256", "hashlib.file_digest", duel.run)


def loading(path: Path, what: str) -> Row:
    """The first load of a process, as in `fresh_loads.py`: a later one finds memory that is faulted in."""

    def load(side: str, cache: str) -> dict:
        return fresh.one(Path(fresh_loads.__file__), side, path, cache)

    def samples(rounds: int) -> Samples:
        sides = ("ingot, verified", "ingot")
        digests = [load(side, "check")["digest"] for side in sides]
        assert digests[0] == digests[1], "the bytes differ"
        found = in_turn(rounds, lambda side: load(side, "warm"), sides)
        verified, plain = ([run["seconds"] for run in runs] for runs in found.values())
        return Samples(verified, plain, "s")

    return Row(what, "without", samples, TIME)


def saving(path: Path, arrays: dict[str, np.ndarray], what: str, checksums: str) -> Row:
    new = path.with_name("new.safetensors")

    def save(**options: str) -> None:
        ingot.numpy.save_file(arrays, new, durable=False, **options)

    def clean() -> None:
        new.unlink(missing_ok=True)

    duel = Duel(lambda: save(checksums=checksums), save, lambda *_: None, clean)
    return Row(what, "without", duel.run)


def rows(blake3: Path, xxh3: Path) -> list[Row]:
    return [
        verifying(blake3, "verify, BLAKE3", SPEED),
        verifying_as_whole(blake3),
        verifying(xxh3, "verify, XXH3-128"),
        loading(blake3, "load_file(verify=True), owned, BLAKE3"),
        loading(xxh3, "load_file(verify=True), owned, XXH3-128"),
        hashing(xxh3),
        saving(xxh3, ingot.numpy.load_file(xxh3), "save_file(checksums='blake3', durable=False)", "blake3"),
    ]


def main() -> None:
    given = arguments()
    with options.place(given.dir) as place:
        print(*record.sentences(record.conditions(place, 1.0)), "", sep="\n")
        random = np.random.default_rng(0)
        arrays = {f"layers.{i}.weight": random.random((given.mib * 32, 1024), np.float32) for i in range(8)}
        blake3, xxh3 = place / "blake3.safetensors", place / "xxh3.safetensors"
        ingot.numpy.save_file(arrays, blake3, checksums="blake3", durable=False)
        ingot.numpy.save_file(arrays, xxh3, checksums="xxh3_128", durable=False)
        del arrays
        nbytes = blake3.stat().st_size
        for row in rows(blake3, xxh3):
            samples = row.samples(given.rounds)
            ours, theirs = statistics.median(samples.ours), statistics.median(samples.theirs)
            print(
                f"{row.what}: {ours:.3f} s, {nbytes / ours / 1e9:.2f} GB/s; {row.beside}: {theirs:.3f} s, "
                f"{nbytes / theirs / 1e9:.2f} GB/s; speed {theirs / ours:.2f}× {row.goal}",
                flush=True,
            )


if __name__ == "__main__":
    main()
