"""Programs of the guides, run as their readers run them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ingot.numpy

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
STEP = 'state["step"] += 1\n'


def programs(guide: str) -> list[str]:
    """Return the Python blocks of a guide."""
    text = (GUIDES / guide).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(program: str, folder: Path) -> int:
    """Run a program in a folder, and return its exit status."""
    return subprocess.run([sys.executable, "-c", program], cwd=folder, check=False).returncode


def at_step(program: str, number: int, statement: str) -> str:
    """Return a training program that runs a statement after a step."""
    assert program.count(STEP) == 1
    indent = program.partition(STEP)[0].rpartition("\n")[2]
    return program.replace(STEP, f'{STEP}{indent}if state["step"] == {number}: {statement}\n')


def check_resume(
    program: str, killed_at: int, folder: Path, saved: str, look: Callable[[Path], None]
) -> None:
    """Run a program, and run it again with a kill and a resume. Check that both runs save an equal file.

    `saved` is the name of the file. `look` is called with the folder of the killed program.
    """
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(program, whole) == 0
    kill = f'__import__("os").kill(__import__("os").getpid(), {signal.SIGKILL:d})'
    assert run(at_step(program, killed_at, kill), killed) == -signal.SIGKILL
    look(killed)
    assert run(program, killed) == 0
    # The generators of Python and NumPy began with other seeds.
    drop = ingot.glob("rng.python.*", "rng.numpy.*")
    expected, found = (ingot.numpy.load_file(place / saved, drop=drop) for place in (whole, killed))
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
