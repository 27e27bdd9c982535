"""Running Python code under strace, which makes system calls fail, changes their results, or logs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes import PRELUDE, Ended

# A program says `mark("name")` before the calls that matter.
MARK = "/what-comes-next-is-"
PROGRAM = PRELUDE + f"\ndef mark(name):\n    os.path.exists({MARK!r} + name)\n"


@dataclass(frozen=True)
class Traced(Ended):
    """The end of a traced process, and its calls."""

    calls: dict[str, list[str]]
    """By what the last mark before them said: ``name(arguments) = result``, with the paths of descriptors."""


def traced(
    program: str,
    *arguments: object,
    folder: Path,
    trace: str = "",
    inject: Sequence[str] = (),
    only: Path | None = None,
) -> Traced:
    """Run `program` in `folder` under strace, which logs the calls in `trace` and those that it changes.

    `inject` defines faults of calls, such as ``"fsync:error=EIO"``. With `only`, they apply to calls on this
    path only.
    """
    log = folder.parent / f"{folder.name}.strace"
    changed = [change.partition(":")[0] for change in inject]
    # `mark` calls `stat` or `newfstatat`.
    options = ["-e", "trace=" + ",".join(filter(None, ("stat", "newfstatat", trace, *changed)))]
    for change in inject:
        options += ["-e", f"inject={change}"]
    if only is not None:
        options += ["-P", str(only)]
    # The folder must not be on the path of modules.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1", "RUST_BACKTRACE": "0"}
    try:
        ended = subprocess.run(
            ["strace", "-f", "--seccomp-bpf", "-y", "-o", log, *options]
            + [sys.executable, "-c", PROGRAM + program, *map(str, arguments)],
            env=os.environ | environment,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    lines = log.read_text(errors="backslashreplace").splitlines() if log.exists() else []
    if not lines:
        pytest.skip(f"strace cannot do this here: {ended.stderr.strip()}")
    name, calls = "", {"": list[str]()}
    for line in lines:
        # The number of the thread comes first.
        call = line.partition(" ")[2].strip()
        if MARK in call:
            name = call.partition(MARK)[2].partition('"')[0]
            calls[name] = []
        else:
            calls[name].append(call)
    return Traced(ended.returncode, ended.stdout, ended.stderr, calls)
