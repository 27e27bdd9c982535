"""Measure how the safetensors and bintensors wheels judge every vector.

Run `python -m vectors.measure_upstream` in the folder `tests`. It reports each vector whose `upstream`
differs from the measurement, and fails if there is one. `--write` writes the measurements to the TOML files.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from typing import Any

import bintensors
import safetensors

from vectors.case import FOLDER, Vector, vectors

# The versions that `upstream` refers to, in `.venv` and for `make test-rc`. Others may judge differently.
VERSIONS = {"safetensors": ("0.8.0", "0.9.0rc1"), "bintensors": ("0.2.0",)}


def deserialize(format: str, file: bytes) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the tensors that the wheel of that format reads, or None if it rejects the file."""
    try:
        return (bintensors if format == "bintensors" else safetensors).deserialize(file)
    except (safetensors.SafetensorError, bintensors.BintensorError):
        return None


def measure(vector: Vector) -> str:
    """`accept` or `reject`, by the wheel of the vector's format."""
    return "reject" if deserialize(vector.format, vector.file()) is None else "accept"


def write(measured: dict[str, str]) -> None:
    """Write the verdicts to the TOML files, after `expect` and `code`."""
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text("utf-8")
        head, *blocks = re.split(r"(?m)^(?=\[\[[a-z])", text)
        for at, block in enumerate(blocks):
            name = re.search(r'(?m)^name = "(.*)"$', block)
            if block.startswith("[[vector]]") and name:
                block = re.sub(r"(?m)^upstream = .*\n", "", block)
                verdict = f'\\g<0>upstream = "{measured[name[1]]}"\n'
                blocks[at] = re.sub(r"(?m)^expect = .*\n(code = .*\n)?", verdict, block, count=1)
        path.write_text(head + "".join(blocks), "utf-8")


def main() -> int:
    for package, expected in VERSIONS.items():
        if version(package) not in expected:
            print(f"{package}: expected version {' or '.join(expected)}, found {version(package)}")
            return 1
    measured = {vector.name: measure(vector) for vector in vectors()}
    if sys.argv[1:] == ["--write"]:
        write(measured)
        return 0
    wrong = [vector.name for vector in vectors() if vector.keys.get("upstream") != measured[vector.name]]
    for name in wrong:
        print(f"{name}: measured {measured[name]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
