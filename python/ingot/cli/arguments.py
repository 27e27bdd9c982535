"""Arguments and options that several commands have, and what they are checked for."""

from __future__ import annotations

import os
import re

import click

from ingot._native import is_url, local_path

from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Given = TypeVar("Given", str, tuple[str, ...], None)
    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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


# Whatever `sources.opened` takes; that it is there is found out by opening it.
path: Decorator = click.argument("path", metavar="PATH", callback=anywhere)
paths: Decorator = click.argument("paths", metavar="PATH...", nargs=-1, required=True, callback=anywhere)
own: Decorator = click.argument("path", metavar="PATH", callback=local)
source: Decorator = click.argument("path", metavar="SRC", callback=anywhere)
destination: Decorator = click.argument("output", metavar="DST", callback=local)
dry_run: Decorator = click.option(
    "--dry-run", is_flag=True, help="Say what would be written, and write nothing."
)
force: Decorator = click.option("-f", "--force", is_flag=True, help="Replace what is there.")


def writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what all have that make files."""
    return force(dry_run(function))


def target(given: str, force: bool) -> str:
    """A path to write to, which must not be there without ``--force``."""
    if os.path.isdir(given):
        raise click.UsageError(f"{shown(given)}: is a directory: expected the name of a file")
    if os.path.lexists(given) and not force:
        raise click.UsageError(f"{shown(given)}: is there already: --force replaces it")
    return given


def pattern(text: str | None) -> re.Pattern[str] | None:
    """A regular expression that the user typed."""
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise click.UsageError(f"{shown(text)}: is no regular expression: {error}") from None
