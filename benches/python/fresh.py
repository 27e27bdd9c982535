"""A Python process that did nothing before, for figures that a used one would hide."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def run(program: Path, *arguments: str) -> dict:
    """The JSON object that `program` prints. Compiled modules are cached by the first run."""
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout)


def in_turn(rounds: int, measure: Callable[[str], dict], sides: tuple[str, str]) -> dict[str, list[dict]]:
    """`measure` of both sides, `rounds` times, in changing order."""
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            found[side].append(measure(side))
    return found
