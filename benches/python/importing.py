"""Importing the package in a fresh interpreter. As a program: one such import."""

import sys
import time
from pathlib import Path


def measure(place, rounds: int):
    import fresh
    from duel import Samples
    from turns import in_turn

    def one(package: str) -> dict:
        return fresh.run(Path(__file__), package)

    # An import returns no bytes to compare; only check that it imports no framework.
    assert one("ingot")["frameworks"] == [], "a framework was imported too"
    found = in_turn(rounds, one, ("ingot", "safetensors"))
    ours, theirs = ([run["seconds"] for run in found[package]] for package in ("ingot", "safetensors"))
    return Samples(ours, theirs)


if __name__ == "__main__":
    package = sys.argv[1]
    start = time.perf_counter()
    __import__(package)
    seconds = time.perf_counter() - start
    # Imported by now only: json must not be there before the package asks for it.
    import json

    frameworks = sorted({"numpy", "torch", "ml_dtypes"} & set(sys.modules))
    print(json.dumps({"seconds": seconds, "frameworks": frameworks}))
