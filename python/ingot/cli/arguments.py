"""Arguments and options that several commands have, and what they are checked for."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from functools import wraps

import click

from ingot._base.checks import FLOATS, Existing, float_code
from ingot._native import is_url, local_path
from ingot.errors import OptionError, SafetensorError
from ingot.typing import Glob

from .screen import warn
from .sources import opened
from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    from click.shell_completion import CompletionItem

    Given = TypeVar("Given", str, tuple[str, ...], None)
    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# Where the context of a command keeps what it writes to.
_TARGET = "ingot.target"


def local(context: click.Context, parameter: click.Parameter, given: Given) -> Given:
    """A path, or several, of this machine: for what is written to."""
    return _each(given, _local)


def anywhere(context: click.Context, parameter: click.Parameter, given: Given) -> Given:
    """A path or a URL, or several: for what is read. That of ``file:`` is a path."""
    return _each(given, lambda one: one if is_url(one) else _local(one))


def _each(given: Given, located: Callable[[str], str]) -> Given:
    if isinstance(given, tuple):
        return tuple(map(located, given))
    return located(given) if isinstance(given, str) else given


def _local(given: str) -> str:
    # What is empty is refused by whoever opens it.
    return os.fsdecode(local_path(given))


def paths(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tell a shell to complete paths as it always does."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def tensor_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tell a shell which tensors of PATH begin so, in natural order; nothing where a URL would be asked."""
    from click.shell_completion import CompletionItem

    path = context.params.get("path")
    if not isinstance(path, str) or is_url(path):
        return []
    with suppress(SafetensorError, OSError):
        names = [info.name for info in opened(path).in_natural_order()]
        # What cannot be printed cannot be completed.
        return [CompletionItem(name) for name in names if name.startswith(incomplete) and name.isprintable()]
    return []


def matching_paths(incomplete: str) -> list[CompletionItem]:
    """The paths that begin so, as words."""
    from glob import escape, glob

    from click.shell_completion import CompletionItem

    found = sorted(glob(escape(incomplete) + "*"))
    return [CompletionItem(os.path.join(path, "") if os.path.isdir(path) else path) for path in found]


# Whatever `sources.opened` takes; that it is there is found out by opening it.
path: Decorator = click.argument("path", metavar="PATH", callback=anywhere, shell_complete=paths)
several: Decorator = click.argument(
    "paths", metavar="PATH...", nargs=-1, required=True, callback=anywhere, shell_complete=paths
)
own: Decorator = click.argument("path", metavar="PATH", callback=local, shell_complete=paths)
source: Decorator = click.argument("path", metavar="SOURCE", callback=anywhere, shell_complete=paths)
destination: Decorator = click.argument(
    "destination", metavar="DESTINATION", callback=local, shell_complete=paths
)
dry_run: Decorator = click.option(
    "--dry-run", is_flag=True, help="Say what would be written, and write nothing."
)


def output(tells: str, *, required: bool = False) -> Decorator:
    """An option for the file that is written."""
    return click.option(
        "-o",
        "--output",
        metavar="FILE",
        required=required,
        callback=local,
        shell_complete=paths,
        help=tells,
    )


class FloatDtype(click.Choice[str]):
    """A dtype that floats are converted to, in any spelling. Help and shells list the codes."""

    def __init__(self) -> None:
        super().__init__(FLOATS, case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Give the code."""
        try:
            return float_code(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)


def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--keys`` and ``--drop`` to a command, which gets each as a selector, or None without patterns.

    The argument ``NAME...`` of a command is a short form of ``--keys``.
    """

    @click.option(
        "--keys",
        multiple=True,
        metavar="PATTERN",
        shell_complete=tensor_names,
        help="Only these tensors: names, or patterns with * and ?.",
    )
    @click.option(
        "--drop", multiple=True, metavar="PATTERN", shell_complete=tensor_names, help="Not these tensors."
    )
    @wraps(function)
    def command(
        *given: Any, keys: tuple[str, ...], drop: tuple[str, ...], names: tuple[str, ...] = (), **options: Any
    ) -> Any:
        return function(*given, keys=patterns((*names, *keys)), drop=patterns(drop), **options)

    return command


def patterns(given: tuple[str, ...]) -> Glob | None:
    """Return a selector of the patterns that the user typed, or None without patterns."""
    return Glob(*given) if given else None


def existing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options for a file that is there, and its function both of them as one."""

    @click.option("--overwrite", is_flag=True, help="Replace what is there.")
    @click.option("--replace-read-only", is_flag=True, help="With --overwrite: a read-only file too.")
    @wraps(function)
    def command(*given: Any, overwrite: bool, replace_read_only: bool, **options: Any) -> Any:
        return function(*given, existing=Existing(overwrite, replace_read_only), **options)

    return command


def writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what all have that make files."""
    return existing(dry_run(function))


def target(given: str, existing: Existing) -> str:
    """A path to write to, which must not be there without ``--overwrite``.

    `honest_when_interrupted` tells of it.
    """
    if os.path.isdir(given):
        raise click.UsageError(f"{shown(given)}: is a directory: expected the name of a file")
    existing.check(given)
    click.get_current_context().meta[_TARGET] = given, _identity(given)
    return given


@contextmanager
def honest_when_interrupted(context: click.Context) -> Iterator[None]:
    """Say so when Ctrl-C came too late: when the file of `target` had already taken its name."""
    try:
        yield
    except (click.Abort, KeyboardInterrupt):
        given, before = context.meta.get(_TARGET, (None, None))
        if given is not None and _identity(given) not in (None, before):
            warn(f"{shown(given)}: is written and complete: the interruption came after it")
        raise


def _identity(path: str) -> tuple[int, int, int] | None:
    """What tells the file at `path` from another one, or from itself before it was changed."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def pattern(text: str | None) -> re.Pattern[str] | None:
    """A regular expression that the user typed."""
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise click.UsageError(f"{shown(text)}: is no regular expression: {error}") from None
