"""Arguments and options that several commands have, and what they are checked for."""

from __future__ import annotations

import os
import re

import click

from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# Whatever `sources.opened` takes; that it is there is found out by opening it.
path: Decorator = click.argument("path", metavar="PATH")
dry_run: Decorator = click.option(
    "--dry-run", is_flag=True, help="Say what would be written, and write nothing."
)
force: Decorator = click.option("-f", "--force", is_flag=True, help="Replace what is there.")


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
