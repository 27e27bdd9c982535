"""Where a command prints, and in which of its forms.

For people on a terminal: tables with headings, cut to its width. In a pipe: one line for each row, its cells
separated by tabs, nothing cut and no headings. With ``--json``: one line of ASCII. With ``--quiet``: only
what the next command needs, often nothing but the exit status.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import islice

import click

from . import tables
from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, Concatenate, ParamSpec, TextIO

    from .spoken import Failure
    from .tables import Column

    P = ParamSpec("P")

# Rows that are written at once.
_BLOCK = 1000
# Characters that are written at once: no more than a pipe holds.
_PART = 1 << 16


class Screen:
    """Standard output, in the form that was asked for."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.out: TextIO = sys.stdout
        self.as_json = as_json
        self.quiet = quiet
        self.is_terminal = self.out.isatty()
        self.has_colour = self.is_terminal and not os.environ.get("NO_COLOR") and _term() != "dumb"
        if self.has_colour and sys.platform == "win32":
            # Older consoles print the signs for colours as they are. click brings it there.
            import colorama

            colorama.just_fix_windows_console()

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        from shutil import get_terminal_size

        return get_terminal_size().columns

    def say(self, line: str = "") -> None:
        """Print a line for people. What comes from files has been escaped by whoever made the line."""
        if not (self.as_json or self.quiet):
            self.out.write(line + "\n")

    def result(self, line: str) -> None:
        """Print a line that ``--quiet`` leaves."""
        if not self.as_json:
            self.out.write(line + "\n")

    def answer(self, value: object) -> None:
        """Print the whole answer of ``--json``."""
        if self.as_json:
            text = _json(value) + "\n"
            # In parts: of one that is cut short because the reader has gone, Python 3.11 does not tell.
            for at in range(0, len(text), _PART):
                self.out.write(text[at : at + _PART])

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Print rows of cells. They are escaped here."""
        if self.as_json:
            return
        if self.quiet:
            lines: Iterable[str] = (shown(row[0]) for row in rows)
        elif self.is_terminal:
            lines = tables.aligned(columns, rows, self.width, self.strong)
        else:
            lines = tables.plain(rows)
        self.lines(lines)

    def lines(self, lines: Iterable[str]) -> None:
        """Print many lines."""
        rest = iter(lines)
        while block := list(islice(rest, _BLOCK)):
            self.out.write("\n".join(block) + "\n")

    def strong(self, text: str) -> str:
        """`text` in bold, where there are colours."""
        return click.style(text, bold=True) if self.has_colour else text

    def faint(self, text: str) -> str:
        """`text` in a colour that steps back, where there are colours."""
        return click.style(text, dim=True) if self.has_colour else text


def described(value: Any) -> Any:
    """Return a result of `ingot` as JSON has it: dataclasses and named tuples as objects."""
    if is_dataclass(value):
        return {one.name: described(getattr(value, one.name)) for one in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: described(one) for name, one in value._asdict().items()}
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    return value


def _term() -> str:
    return os.environ.get("TERM", "")


def _json(value: object) -> str:
    import json

    # In ASCII: names may hold what steers a terminal, and lone surrogates have no UTF-8.
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        # Rare, and to look at every value of a long answer takes longer than to write it.
        return json.dumps(finite(value), allow_nan=False)


def finite(value: object) -> object:
    """`value` with the floats that JSON does not have as the strings ``"nan"``, ``"inf"`` and ``"-inf"``."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def printing(function: Callable[Concatenate[Screen, P], int | None]) -> Callable[P, int | None]:
    """Add ``--json`` and ``--quiet`` to a command, which gets the `Screen` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
    @click.option(
        "-q", "--quiet", is_flag=True, help="Print only what a script needs, such as names or paths."
    )
    @wraps(function)
    def command(*arguments: Any, as_json: bool, quiet: bool, **options: Any) -> int | None:
        if as_json and quiet:
            raise click.UsageError("--quiet has no effect with --json")
        return function(Screen(as_json, quiet), *arguments, **options)

    # Its signature is that of `function` and two options, which click gives by name.
    return command  # type: ignore[return-value]


def warn(message: str) -> None:
    """Print a warning on standard error. The caller has escaped names from files."""
    sys.stderr.write(f"warning: {message}\n")


def fail(failure: Failure, as_json: bool) -> int:
    """Print a failure on standard error, and as JSON on standard output; return the exit status."""
    if as_json:
        Screen(as_json=True).answer(failure._asdict())
    sys.stderr.write(f"error: {failure.error}\n")
    return failure.exit_status
