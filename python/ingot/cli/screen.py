"""Print the results of commands in one of four forms.

For people on a terminal: tables with headings, cut to its width. In a pipe: one line for each row, its cells
separated by tabs, nothing cut and no headings. With ``--json``: one line of ASCII. With ``--quiet``: only
what the next command needs, often nothing but the exit status.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from errno import errorcode
from functools import wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TextIO, TypeVar, cast

import click

from ingot._base import progress
from ingot._base.text import nbytes as nbytes
from ingot._base.text import plural as plural
from ingot._base.text import scaled
from ingot._native import TensorInfo, shown_url
from ingot.errors import OptionError, SafetensorError, SliceError, TensorNotFoundError

from .table import Column as Column
from .table import aligned, piped
from .table import shown as shown

if TYPE_CHECKING:
    from ingot.typing import Tell

    P = ParamSpec("P")

T = TypeVar("T")
R = TypeVar("R")

# The text form of names, numbers and sizes, and tables of them.


def count(number: int) -> str:
    """Return a number of parameters: ``22.7M``."""
    return str(number) if number < 1000 else scaled(number, ("K", "M", "B", "T", "Q"), "")


def shape(dims: Iterable[int]) -> str:
    """Return a shape as text: ``[30522, 384]``."""
    return f"[{', '.join(map(str, dims))}]"


def real(value: float | None) -> str:
    """Return a value in six significant digits, or ``-`` for None."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


_ROWS_AT_ONCE = 500


def plain(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines with tabs between the cells."""
    rest = iter(rows)
    # Check many cells at once, since few need escapes, and single checks take half the time of a long list.
    while block := list(islice(rest, _ROWS_AT_ONCE)):
        text = "".join(chain.from_iterable(block))
        if text.isascii() and text.isprintable():
            yield from map("\t".join, block)
        else:
            yield from ("\t".join(map(piped, row)) for row in block)


def comma_separated(rows: Iterable[Sequence[str]], is_terminal: bool) -> Iterator[str]:
    """Yield the rows as lines of CSV (RFC 4180). Control characters are only escaped on a terminal.

    A text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    import csv
    import io

    for row in rows:
        line = io.StringIO()
        cells = map(shown, row) if is_terminal else row
        # Cells with a character of the line's end are quoted.
        csv.writer(line, lineterminator="\r\n").writerow([*map(_not_a_formula, cells)])
        yield line.getvalue().removesuffix("\r\n")


def _not_a_formula(cell: str) -> str:
    return f"'{cell}" if _FORMULA.match(cell) and not _SIGNED_NUMBER.fullmatch(cell) else cell


_FORMULA = re.compile(r"\s*[=+\-@]")
_SIGNED_NUMBER = re.compile(r"[+-](\d+(\.\d+)?(e[+-]?\d+)?|inf|nan)?")


# The number of rows that are written at once.
_BLOCK = 1000
# The number of characters that are written at once. A pipe buffers at least as many.
_PART = 1 << 16


class Screen:
    """Standard output in the requested form."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.out: TextIO = sys.stdout
        self.as_json = as_json
        self.quiet = quiet
        context = click.get_current_context(silent=True)
        self.as_csv: bool = context is not None and context.meta.get(_CSV, False)
        self.is_terminal = self.out.isatty()
        self.has_colour = self.is_terminal and not os.environ.get("NO_COLOR") and _term() != "dumb"
        if self.has_colour and sys.platform == "win32":
            # Older consoles print escape sequences as text. click installs colorama on Windows.
            import colorama

            colorama.just_fix_windows_console()

    @property
    def width(self) -> int:
        """The number of columns of the terminal."""
        from shutil import get_terminal_size

        return get_terminal_size().columns

    @property
    def shows_bars(self) -> bool:
        """Whether progress is shown on standard error."""
        return sys.stderr.isatty() and not self.quiet and _term() != "dumb"

    def size(self, number: int) -> str:
        """Return a size in bytes, with a unit on a terminal: people compare sizes, programs add them."""
        return nbytes(number) if self.is_terminal and not self.as_csv else str(number)

    def say(self, line: str = "") -> None:
        """Print a line for people. The caller has escaped text from files."""
        if not (self.as_json or self.quiet or self.as_csv):
            self.out.write(line + "\n")

    def result(self, line: str) -> None:
        """Print a line also with ``--quiet``."""
        if not self.as_json:
            self.out.write(line + "\n")

    def answer(self, value: object) -> None:
        """Print the whole result for ``--json``."""
        if self.as_json:
            text = _json(value) + "\n"
            # Write in parts, since Python 3.11 does not report a long write that a closed pipe cuts short.
            for at in range(0, len(text), _PART):
                self.out.write(text[at : at + _PART])

    def reports(self, found: Sequence[object]) -> None:
        """Print the fields of a result as JSON, or of several as an array."""
        if self.as_json:
            self.answer(described(found[0] if len(found) == 1 else found))

    def failed(self, path: str, error: SafetensorError | OSError) -> dict[str, object]:
        """Print the failure of one of many files, and return its JSON form."""
        name = shown(shown_url(path))
        what = message_of(error, [path]).removeprefix(f"{name}: ")
        # The work on the other files continues without a reader of the errors.
        with suppress(BrokenPipeError):
            sys.stderr.write(f"error: {name}: {what}\n")
        return {"path": shown_url(path), "error": what, "code": _code(error)}

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Print rows of cells. They are escaped here."""
        if self.as_json:
            return
        if self.as_csv:
            self.lines(comma_separated([[column.title for column in columns], *rows], self.is_terminal))
            return
        if self.quiet:
            text = shown if self.is_terminal else piped
            lines: Iterable[str] = (text(row[0]) for row in rows)
        elif self.is_terminal:
            lines = aligned(columns, rows, self.width, self.strong)
        else:
            lines = plain(rows)
        self.lines(lines)

    def lines(self, lines: Iterable[str]) -> None:
        """Print many lines."""
        rest = iter(lines)
        while block := list(islice(rest, _BLOCK)):
            self.out.write("\n".join(block) + "\n")

    def strong(self, text: str) -> str:
        """Return `text` in bold if colours are on."""
        return click.style(text, bold=True) if self.has_colour else text

    def faint(self, text: str) -> str:
        """Return `text` dimmed if colours are on."""
        return click.style(text, dim=True) if self.has_colour else text


_FACTS = ("name", "dtype", "shape", "begin", "end", "nbytes", "parameter_count")


def described(value: Any) -> Any:
    """Return the JSON form of a result of `ingot`: dataclasses and named tuples become objects."""
    if is_dataclass(value):
        return {one.name: described(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, TensorInfo):
        return {name: getattr(value, name) for name in _FACTS}
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

    # In ASCII, since names may contain control characters and lone surrogates.
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        # Such floats are rare, and checking every value of a long result takes longer than writing it.
        return json.dumps(finite(value), allow_nan=False)


def finite(value: object) -> object:
    """Return `value` with ``"nan"``, ``"inf"`` and ``"-inf"`` in place of floats that JSON does not have."""
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
        is_csv = click.get_current_context().meta.get(_CSV, False)
        if is_csv and (as_json or quiet):
            raise click.UsageError(f"--csv has no effect with {'--json' if as_json else '--quiet'}")
        if as_json and quiet:
            raise click.UsageError("--quiet has no effect with --json")
        return function(Screen(as_json, quiet), *arguments, **options)

    # The wrapper has the signature of `function` plus two options, which click passes by name.
    return command  # type: ignore[return-value]


# The key in the context of a command.
_CSV = "ingot.csv"


def _keep_csv(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    context.meta[_CSV] = given


#: The option of commands that print one table. The screen reads it from the context.
csv = click.option(
    "--csv",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_keep_csv,
    help="Print the table as CSV, with titles.",
)


class OfEach(Generic[T]):
    """The results of the same work on several models, or the error of the only one.

    A model that fails is reported, and the work continues with the next one. `report` prints a result. After
    the reader of the output closes the pipe, nothing more is printed, but the work continues: the size of a
    pipe's buffer must not decide which files are changed. The error is raised at the end.
    """

    def __init__(
        self,
        screen: Screen,
        models: Sequence[str],
        work: Callable[[str], T],
        is_single: bool | None = None,
        report: Callable[[T], None] = lambda _: None,
    ) -> None:
        self.is_single = len(models) == 1 if is_single is None else is_single
        self.found: list[tuple[str, T]] = []
        # The exit status: the greatest of all models.
        self.status = 0
        self._failed: dict[int, dict[str, object]] = {}
        closed: BrokenPipeError | None = None
        for at, model in enumerate(models):
            try:
                result = work(model)
            except OptionError:
                raise
            except (SafetensorError, OSError) as error:
                if self.is_single:
                    raise
                self._failed[at] = screen.failed(model, error)
                self.status = max(self.status, status(error))
            else:
                self.found.append((model, result))
                closed = closed or _closed(report, result)
        if closed is not None:
            raise closed

    def replaced(self, results: Sequence[R]) -> OfEach[R]:
        """Return the same with other results, in the same order."""
        other = cast("OfEach[R]", copy(self))
        other.found = [(model, one) for (model, _), one in zip(self.found, results, strict=True)]
        return other

    @property
    def errors(self) -> list[dict[str, object]]:
        """The JSON forms of the errors."""
        return [*self._failed.values()]

    def in_order(self, of_found: Iterable[Any]) -> list[Any]:
        """Return a list with an item for each result, and the JSON forms of the errors in their places."""
        rest = iter(of_found)
        return [self._failed.get(at) or next(rest) for at in range(len(self.found) + len(self._failed))]


def _closed(report: Callable[[T], None], result: T) -> BrokenPipeError | None:
    """Print a result. Return the error if the reader of the output has closed the pipe."""
    try:
        report(result)
    except BrokenPipeError as error:
        return error
    return None


def discard_output() -> None:
    """Let Python write nothing more to standard output, which it flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(message: str) -> None:
    """Print a warning on standard error. The caller has escaped names from files."""
    sys.stderr.write(f"warning: {message}\n")


def fail(failure: Failure, as_json: bool) -> int:
    """Print a failure on standard error, and as JSON on standard output; return the exit status."""
    try:
        if as_json:
            Screen(as_json=True).answer(failure._asdict())
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        # The failure may be that standard output cannot be written, for example to a full disk.
        discard_output()
    sys.stderr.write(f"error: {failure.error}\n")
    return failure.exit_status


# The progress bar on standard error.

# Seconds. Shorter work has no bar.
_PATIENCE = 1.0


@contextmanager
def bar(screen: Screen, title: str) -> Iterator[Tell]:
    """Yield a function for ``(bytes done, bytes in all)``. After a second it shows a bar on a terminal."""
    begun = time.monotonic()
    with ExitStack() as shown:
        tell: Tell | None = None

        def report(done: int, total: int) -> None:
            nonlocal tell
            if tell is None and screen.shows_bars and time.monotonic() - begun >= _PATIENCE:
                tell = shown.enter_context(progress.reporting(True, title))
            if tell is not None:
                tell(done, total)

        yield report


# The message, the code and the exit status of a failure.
#
# Messages name options of the command instead of arguments of Python, and contain no secrets.


# Errors in the arguments, not in a file.
_TYPED = (TensorNotFoundError, SliceError, OptionError)
# Errors of the system about a path as it was typed, and missing packages.
_NOT_BEGUN = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, ImportError)

# The arguments that the messages of `ingot` name. Each has an option of the same name with dashes.
_ARGUMENTS = re.compile(
    "dtype|expected_sha256|filename_pattern|keys|drop|max_nbytes|max_shard_size|on_duplicate|overwrite"
    "|replace_read_only|root|source_format|strip_prefix|threads"
)
# Advice in messages that needs other words in the command.
_PHRASES = {
    " — format=… names it": "",
    " — say which by metadata=": " — make them equal with `ingot meta set`",
    "save_file(..., atomic=False) writes an existing file in place instead, though not atomically": (
        "make its directory writable, since a new file replaces the old one there"
    ),
    ', or load files without backend="mmap"': "",
    'write_options={"replace_read_only": True}': "replace_read_only=True",
}
# An argument with a value, as in `overwrite=True`, or alone if it has an underscore, so that it cannot be an
# English word.
_ARGUMENT = re.compile(
    r"\b([a-z_]+)=(?:True|False|…|\.\.\.|(\d+\b|'\w+'))?(?![\w=])|\b([a-z]+(?:_[a-z0-9]+)+)\b"
)
_FUNCTION = re.compile(r"\A\w+\(\): ")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/+[^\s'\"`]*[^\s'\"`.,:;)]")


class Failure(NamedTuple):
    """The output of a command that fails. With ``--json`` the fields are the keys of the object."""

    error: str
    code: str
    exit_status: int


def failure(error: BaseException, typed: Iterable[str]) -> Failure:
    """Return how `error` is reported to a user who typed the words `typed`."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Failure("interrupted", "interrupted", 130)
    if isinstance(error, click.ClickException):
        return Failure(one_line(_usage(error), typed), "usage", 2)
    return Failure(message_of(error, typed), _code(error), status(error))


def _usage(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        near = (error.possibilities or [])[:1]
        text = no_such("option", error.option_name, near)
    else:
        # click lists choices on lines of their own, and ends sentences.
        text = error.format_message().replace("\n\t", " ").removesuffix(".")
        text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    return f"{text} (see `{context.command_path} --help`)" if context else text


def no_such(what: str, word: str, near: Sequence[str]) -> str:
    """Return the message for an unknown `word`, with the nearest known one."""
    hint = f": did you mean `{near[0]}`?" if near else ""
    return f"no such {what} `{word}`{hint}"


def _code(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "missing-package"
    if isinstance(error, MemoryError):
        return "ENOMEM"
    code: str | None = getattr(error, "code", None)
    return code or errorcode.get(getattr(error, "errno", None) or 0, "error")


def message_of(error: BaseException, typed: Iterable[str]) -> str:
    """Return the message of a failure on one line, escaped, without the secrets of `typed`."""
    if isinstance(error, OSError) and not isinstance(error, SafetensorError) and error.strerror:
        # Like the system's own commands, without Python's errno.
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return one_line(where + in_options(error.strerror), typed)
    return one_line(in_options(str(error)), typed) or type(error).__name__


def one_line(message: str, typed: Iterable[str]) -> str:
    """Return `message` on one line, escaped, without secrets and without the name of a Python function."""
    message = _FUNCTION.sub("", message)
    return shown(without_secrets(" ".join(message.split("\n")), typed))


def status(error: BaseException) -> int:
    """Return the exit status: 1 for a faulty file or a failure, 2 for a command that cannot work as typed."""
    return 2 if isinstance(error, _TYPED if isinstance(error, SafetensorError) else _NOT_BEGUN) else 1


def in_options(message: str) -> str:
    """Return `message` with the command's options in place of Python's arguments."""
    for phrase, other in _PHRASES.items():
        message = message.replace(phrase, other)
    # Text between backticks is a name.
    parts = message.split("`")
    parts[::2] = [_ARGUMENT.sub(_option, part) for part in parts[::2]]
    return "`".join(parts)


def _option(found: re.Match[str]) -> str:
    name = found[1] or found[3]
    if not _ARGUMENTS.fullmatch(name):
        return found[0]
    option = f"--{name.replace('_', '-')}"
    return f"{option} {found[2]}" if found[2] else option


def without_secrets(message: str, typed: Iterable[str]) -> str:
    """Return `message` without the secrets of `typed` and other URLs in it."""
    for word in typed:
        if "://" in word:
            message = message.replace(word, shown_url(word))
    return _URL.sub(lambda found: shown_url(found[0]), message)
