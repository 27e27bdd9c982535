"""Running `ingot`: in this process, in another process with pipes, and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ingot.cli.program import run as run_program


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output as JSON, which is one line of ASCII."""
        assert self.out.isascii()
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=lambda constant: 1 / 0)

    def rows(self) -> list[list[str]]:
        """Its lines, each split into cells."""
        return [line.split("\t") for line in self.out.splitlines()]


def run(*arguments: object) -> Ended:
    """Run it in this process, as if its output were a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_program([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


def good(*arguments: object) -> Ended:
    """Run it, and check that it succeeds without warnings."""
    ended = run(*arguments)
    assert ended.code == 0, ended
    assert ended.err == ""
    return ended


def environment(**variables: str) -> dict[str, str]:
    """Return an environment for commands, without variables that change their output."""
    plain = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**plain, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", **variables}


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ingot", *map(str, arguments)]


def in_a_pipe(*arguments: object, folder: Path | None = None, stdin: bytes = b"", **variables: str) -> Ended:
    done = subprocess.run(
        command_line(*arguments),
        input=stdin,
        capture_output=True,
        cwd=folder,
        env=environment(**variables),
        check=False,
    )
    return Ended(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )


def in_a_terminal(
    *arguments: object, folder: Path | None = None, columns: int = 100, **variables: str
) -> Ended:
    """Run it in a terminal of `columns` × 40 characters. `out` has the output of both streams."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command_line(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment(**variables),
        start_new_session=True,
    )
    os.close(theirs)
    text = b""
    # Linux returns EIO once the other end is closed.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 1 << 16):
            text += chunk
    os.close(ours)
    return Ended(process.wait(), text.decode("utf-8", "replace").replace("\r\n", "\n"), "")


def every(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command with its words, including the commands of `meta` and `modelspec`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every(command, *names, name)
        else:
            yield (*names, name), command
