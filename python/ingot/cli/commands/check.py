"""``ingot check``: problems of files that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ingot._native import shown_url
from ingot._read.check import Check, Problem, check
from ingot.cli import arguments
from ingot.cli.screen import Screen, bar, message_of, plural, printing, shown, status
from ingot.cli.sources import models_of
from ingot.errors import SafetensorError


@arguments.command(short_help="Find problems of files.")
@arguments.several
@click.option("--values", is_flag=True, help="Also find NaN, infinities, and bools that are not 0 or 1.")
@arguments.selecting
@printing
def command(screen: Screen, /, paths: tuple[str, ...], **options: Any) -> int:
    """Find problems of files that can be read. The exit status is 1 if there are any.

    Checks all rules of the format, including those that readers do not enforce (FORMAT.md, "Leniency"), the
    alignment of tensors, and the digests in the names of files in the Hugging Face cache.

    With several paths, or a directory of several models, all of them are checked. A file that
    cannot be read has an error instead of problems. The exit status is the greatest of all: 2 if a path
    is missing. --quiet prints the paths with problems.
    """
    every: list[Check] = []
    greatest = 0
    models = models_of(paths)
    for path in models:
        try:
            found = _checked(screen, path, options)
            code = 0 if found.ok else 1
        except (SafetensorError, OSError) as error:
            if len(models) == 1:
                raise
            found, code = _failed(path, error), status(error)
        # At once: the next path may take long.
        _print(screen, found, options)
        every.append(found)
        greatest = max(greatest, code)
    screen.reports(every)
    if len(every) > 1:
        screen.say(_summary(every, options["values"]))
    return greatest


def _checked(screen: Screen, path: str, options: dict[str, Any]) -> Check:
    with bar(screen, "Reading") as tell:
        return check(path, **options, progress=tell)


def _failed(path: str, error: SafetensorError | OSError) -> Check:
    name = shown_url(path)
    what = message_of(error, [path]).removeprefix(f"{shown(name)}: ")
    return Check(name, 0, (Problem("error", name, what),))


def _print(screen: Screen, found: Check, options: dict[str, Any]) -> None:
    if screen.quiet and not found.ok:
        screen.result(shown(found.source))
    for kind, where, what in found.problems:
        place = found.source if where == found.source else f"{found.source}: {where}"
        screen.say(shown(f"{place}: {kind}: {what}"))
    if found.ok:
        screen.say(_well(found, options))


def _well(found: Check, options: dict[str, Any]) -> str:
    tensors = plural(found.tensors, "tensor")
    return f"{shown(found.source)}: {tensors}{'' if options['values'] else ', values not read'}: all is well"


def _summary(every: Sequence[Check], has_values: bool) -> str:
    well = sum(map(bool, every))
    if well == len(every):
        return f"{plural(well, 'path')}{'' if has_values else ', values not read'}: all is well"
    errors = sum(any(problem.kind == "error" for problem in one.problems) for one in every)
    found = len(every) - well - errors
    return f"{plural(len(every), 'path')}: {well} well, {found} with findings, {errors} with errors"
