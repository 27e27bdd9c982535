"""Processes that join the writers of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELPER = """
from machine.content import numbered
for line in sys.stdin:
    path, writes, commits = json.loads(line)
    with ingot.Writer.join(path) as guest:
        for name, number, dtype, shape, begin, end in writes:
            guest.write(name, numbered(number, dtype, shape)[begin:end], slice(begin, end))
        if commits:
            guest.commit()
    say("done")
"""


class Helper:
    """A process that joins one writer after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def write(self, path: Path, writes: list[Any], commits: bool) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(path), writes, commits]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == '"done"\n'


@contextmanager
def helpers(count: int) -> Iterator[list[Helper]]:
    from support.processes import PRELUDE

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRELUDE + HELPER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    try:
        yield [Helper(process) for process in processes]
    finally:
        for process in processes:
            process.communicate()
