"""Running Python code in a process of its own, for tests of crashes, kills, limits and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The unprivileged user and group of every system that runs the tests.
NOBODY = 65534

# Names that every program below may use without imports.
PRELUDE = '''
import gc, json, os, resource, signal, sys, threading, time
import numpy
import ingot, ingot.numpy

def say(value):
    print(json.dumps(value), flush=True)

def memory(name):
    "A line of /proc/self/status that is given in kilobytes, in bytes: VmRSS, VmHWM, VmSize."
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def held():
    "How many descriptors this process has, and which threads of ingot's own."
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as name:
                names.append(name.read().strip())
        except OSError:
            pass
    return [descriptors(), sorted(name for name in names if name.startswith("ingot"))]

def settled(expected):
    """What is held when it is `expected`, or else in the end: a flush that nobody waits for any more ends by
    itself, and the system may list a thread for a moment after it was joined."""
    for _ in range(3000):
        found = held()
        if found == expected:
            break
        time.sleep(0.02)
    return found

def become_nobody():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
'''


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def signal(self) -> str | None:
        """The signal that ended it, such as ``"SIGBUS"``."""
        return signal.Signals(-self.code).name if self.code < 0 else None

    def said(self) -> Any:
        """Return the last value of `say`, after a successful end."""
        assert self.code == 0, f"{self.signal or self.code}\n{self.out}\n{self.err}"
        return json.loads(self.out.splitlines()[-1])


def run(program: str, *arguments: object, folder: Path | None = None, **variables: str) -> Ended:
    """Run `program` after the prelude, with `arguments` as ``sys.argv[1:]``, `variables` as environment."""
    return python("-c", PRELUDE + program, *arguments, folder=folder, **variables)


def python(*arguments: object, folder: Path | None = None, **variables: str) -> Ended:
    """Run Python with `arguments` in `folder`, with `variables` added to the environment."""
    # Panics of a wheel need not print where they were.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RUST_BACKTRACE": "0", **variables}
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)
