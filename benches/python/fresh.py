"""A Python process that did nothing before, for figures that a used one would hide."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def run(program: Path, *arguments: object, python: str = sys.executable, **environment: str) -> dict:
    """The JSON object in the last line that `program` prints: libraries may print something before."""
    return json.loads(printed(python, program, *arguments, **environment).splitlines()[-1])


def printed(*command: object, **environment: str) -> str:
    """Run a command, check that it succeeds, and return its output."""
    line = [str(word) for word in command]
    # Installers compile the packages they install. Sources in a checkout are compiled by the first run,
    # unless this variable forbids it, and every run would time the compiler.
    own = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, env=own | environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {done.returncode}")
    return done.stdout


def one(program: Path, *arguments: object, python: str = sys.executable, **environment: str) -> dict:
    """Run the `one` of a program that ends in `start`, and return its result."""
    return run(program, "--one", *arguments, python=python, **environment)


def start(one: Callable[..., dict], main: Callable[[], None]) -> None:
    """Run one measurement if this process was started for it, and the whole bench otherwise."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()


def measured(
    action: Callable[[], Result], end: Callable[[Result], object] = lambda result: None
) -> tuple[Result, dict]:
    """Return the result of `action`, its seconds, and its peak memory beyond the process's memory before.

    The clock stops before `end`; the memory that it takes counts.
    """
    # Resets the peak (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    begun = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begun
    end(result)
    return result, {"seconds": seconds, "peak_nbytes": resident("VmHWM") - before}


def watched(action: Callable[[], Result]) -> tuple[Result, dict]:
    """Return the result of `action`, its seconds, and its peak of anonymous memory beyond the memory before.

    The kernel keeps no such peak, so a thread looks every 2 ms.
    """
    before, most, done = resident("RssAnon"), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    return result, {"seconds": seconds, "anonymous": max(0, most - before)}


def resident(field: str) -> int:
    """Return the memory of this process: ``VmRSS`` now, ``VmHWM`` its peak, ``RssAnon`` without files.

    Not `ru_maxrss`: a new process inherits its parent's value.
    """
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
