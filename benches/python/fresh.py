"""A Python process that did nothing before, for figures that a used one would hide."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def run(program: Path, *arguments: str) -> dict:
    """The JSON object that `program` prints."""
    command = [sys.executable, str(program), *arguments]
    # Installers compile the packages they install. Sources in a checkout are compiled by the first run,
    # unless this variable forbids it, and every run would time the compiler.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout)


def in_turn(rounds: int, measure: Callable[[str], dict], sides: tuple[str, ...]) -> dict[str, list[dict]]:
    """`measure` of both sides, `rounds` times, in changing order."""
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            found[side].append(measure(side))
    return found


def resident(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most.

    `ru_maxrss` would not do: a new process inherits its parent's.
    """
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
