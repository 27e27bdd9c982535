"""A copy of the package with lines added, run by a program, to measure and test a change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ingot

PACKAGE = Path(ingot.__file__).parent

# For each file: lines that occur once in it, with the text to insert before them.
Changes = Mapping[str, Sequence[tuple[str, str]]]


def said_by(program: str, changes: Changes, folder: Path, *arguments: str) -> Any:
    """Run `program` with a changed copy of the package in `folder`. Return its last line, as JSON."""
    copy = folder / "ingot"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "web", "_native.*"))
    for library in PACKAGE.glob("_native.*"):
        (copy / library.name).symlink_to(library)
    for name, lines in changes.items():
        text = (copy / name).read_text()
        for anchor, more in lines:
            assert text.count(anchor) == 1, (name, anchor)
            text = text.replace(anchor, more + anchor)
        (copy / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
