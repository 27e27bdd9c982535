"""The headers of tests/vectors/kinds, which tests/vectors/make_kinds.py writes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

KINDS = Path(__file__).parents[1] / "vectors" / "kinds"
FILES = sorted(KINDS.glob("*.json"))


class Stored(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


def case(path: Path) -> dict[str, Any]:
    """Return a file of the folder, with its tensors one by one."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    tensors = []
    for name, spec in found["tensors"].items():
        dtype, _, shape = spec.partition(" ")
        tensors += [Stored(one, dtype, tuple(json.loads(shape))) for one in unfolded(name)]
    return {**found, "tensors": tensors}


def unfolded(name: str) -> list[str]:
    """Return the names that ``layers.{0-31}.mlp`` is short for."""
    parts = [[part] for part in re.split(r"(\{[0-9,-]+\})", name)]
    choices = [
        numbers(part[0]) if part[0].startswith("{") and part[0][1:2].isdigit() else part for part in parts
    ]
    return ["".join(one) for one in itertools.product(*choices)]


def numbers(text: str) -> list[str]:
    found = []
    for run in text.strip("{}").split(","):
        first, _, last = run.partition("-")
        found += map(str, range(int(first), int(last or first) + 1))
    return found
