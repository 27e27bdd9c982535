"""Opening the largest header that is legal: time and memory. As a program: one opening in a fresh process."""

import hashlib
import importlib
import json
import sys
from pathlib import Path

import fresh
from turns import in_turn

COUNT = 1_750_000


def write(path: Path, count: int) -> None:
    """A file of `count` tensors without elements, in the shortest entries. 98.6 MB of header for `COUNT`."""
    entries = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    header = b"{" + entries.encode() + b"}"
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def _opened(place, rounds: int) -> tuple[dict[str, list[dict]], int]:
    """What each opening took, and the bytes of the header."""
    count = place.count(COUNT)
    path = place.made(f"empty-{count}.safetensors", lambda path: write(path, count))
    header_nbytes = int.from_bytes(path.read_bytes()[:8], "little")
    sides = ("ingot", "safetensors")
    checks = [fresh.run(Path(__file__), side, path, "names") for side in sides]
    assert checks[0]["count"] == checks[1]["count"] == count, "the number of tensors differs"
    assert checks[0]["names"] == checks[1]["names"], "the names differ"
    return in_turn(rounds, lambda side: fresh.run(Path(__file__), side, path), sides), header_nbytes


def seconds(place, rounds: int):
    from duel import Samples

    found, _ = _opened(place, rounds)
    ours, theirs = ([run["seconds"] for run in runs] for runs in found.values())
    return Samples(ours, theirs)


def memory(place, rounds: int):
    from duel import Samples

    found, header_nbytes = _opened(place, rounds)
    ours, theirs = ([run["peak_nbytes"] / header_nbytes for run in runs] for runs in found.values())
    return Samples(ours, theirs, "× header")


def _open_once(package: str, path: str, names: bool) -> dict:
    opener = importlib.import_module(package).safe_open
    import numpy  # noqa: F401  both import it when they open a file; its import is not timed

    importlib.import_module(f"{package}.numpy")
    file, found = fresh.measured(lambda: opener(path, framework="np"))
    if names:
        keys = sorted(file.keys())
        found |= {"count": len(keys), "names": hashlib.sha256("\0".join(keys).encode()).hexdigest()}
    return found


if __name__ == "__main__":
    print(json.dumps(_open_once(sys.argv[1], sys.argv[2], "names" in sys.argv[3:])))
