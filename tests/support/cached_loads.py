"""Processes that load files again and again, and can be killed at any time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from types import TracebackType

import numpy as np

PROGRAM = """
import json, sys, zlib
import ingot.numpy
for line in sys.stdin:
    url, options = json.loads(line)
    try:
        found = ingot.numpy.load_file(url, storage_options=options)
        value = 0
        for name in sorted(found):
            value = zlib.crc32(found[name].tobytes(), value)
        print(f"{value:08x}", flush=True)
    except Exception as fault:
        print("error", repr(fault).replace("\\n", " "), flush=True)
"""


class Loaders:
    """Processes that load files, each on request."""

    def __init__(self, count: int) -> None:
        self._processes = [self._start() for _ in range(count)]
        self._killed: set[int] = set()

    def __enter__(self) -> Loaders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True, **pipes)

    def begin(self, number: int, url: str, options: dict[str, object]) -> None:
        """Let a process load a file."""
        pipe = self._processes[number].stdin
        assert pipe is not None
        pipe.write(json.dumps([url, options], default=str) + "\n")
        pipe.flush()

    def end(self, number: int) -> str | None:
        """Return the digest of the tensors, or an error; None from a process that was killed before.

        A process that was killed is started again.
        """
        process = self._processes[number]
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if number in self._killed or not line:
            process.communicate()
            self._processes[number] = self._start()
            self._killed.discard(number)
        return line or None

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._killed.add(number)

    @staticmethod
    def wait(seconds: float) -> None:
        """Wait, so that a kill hits any part of a load."""
        time.sleep(seconds)

    @staticmethod
    def digest(tensors: dict[str, np.ndarray]) -> str:
        """Return the digest that a process reports for these tensors."""
        value = 0
        for name in sorted(tensors):
            value = zlib.crc32(tensors[name].tobytes(), value)
        return f"{value:08x}"
