"""``ingot check``: what files should not be like, though they can be read."""

from __future__ import annotations

import click

from ingot._native import shown_url
from ingot._read.check import Check, Problem, check
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.spoken import status, told
from ingot.cli.tables import Column
from ingot.cli.wording import plural, shown
from ingot.errors import SafetensorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_COLUMNS = (Column("finding"), Column("where"), Column("what"))


@click.command(short_help="Find what is wrong, or only odd, with files.")
@arguments.several
@click.option(
    "--values", is_flag=True, help="Read the tensors: NaN, infinities, and BOOL that is neither 0 nor 1."
)
@printing
def command(screen: Screen, paths: tuple[str, ...], values: bool) -> int:
    """Find what is wrong, or only odd, with files. Exits with 1 where something is found.

    The header is held against all rules of the format, also those that readers pass over (FORMAT.md,
    "Leniency"), and tensors must be aligned to their elements. A file that breaks a rule outright is
    refused, as every command refuses it. Files in the Hugging Face cache are compared with the digests in
    their names.

    Several paths are all checked, whatever is found. One that is refused or cannot be opened has an error for
    a finding, and the greatest exit status counts: 2 where a path cannot be opened. --quiet prints the paths
    at which something was found.
    """
    first, *others = paths
    if others:
        return _several(screen, paths, values)
    found = _checked(screen, first, values)
    screen.answer(_described(found))
    if found.ok:
        screen.say(_well(found, values))
    else:
        screen.table(_COLUMNS, found.problems)
    return 0 if found.ok else 1


def _several(screen: Screen, paths: Sequence[str], values: bool) -> int:
    every: list[Check] = []
    greatest = 0
    for path in paths:
        try:
            found = _checked(screen, path, values)
            code = 0 if found.ok else 1
        except (SafetensorError, OSError) as error:
            found, code = _failed(path, error), status(error)
        # At once: the next path may take long.
        _tell(screen, found, values)
        every.append(found)
        greatest = max(greatest, code)
    screen.answer({"ok": all(every), "paths": [{"path": one.source, **_described(one)} for one in every]})
    screen.say(_summary(every))
    return greatest


def _checked(screen: Screen, path: str, values: bool) -> Check:
    with bar(screen, "Reading") as tell:
        return check(path, values=values, progress=tell)


def _failed(path: str, error: SafetensorError | OSError) -> Check:
    name = shown_url(path)
    what = told(error, [path]).removeprefix(f"{shown(name)}: ")
    return Check(name, 0, (Problem("error", name, what),))


def _tell(screen: Screen, found: Check, values: bool) -> None:
    if screen.quiet and not found.ok:
        screen.result(shown(found.source))
    for kind, where, what in found.problems:
        place = found.source if where == found.source else f"{found.source}: {where}"
        screen.say(shown(f"{place}: {kind}: {what}"))
    if found.ok:
        screen.say(_well(found, values))


def _well(found: Check, values: bool) -> str:
    tensors = plural(found.tensors, "tensor")
    return f"{shown(found.source)}: {tensors}{'' if values else ', values not read'}: all is well"


def _summary(every: Sequence[Check]) -> str:
    errors = sum(any(problem.kind == "error" for problem in one.problems) for one in every)
    well = sum(map(bool, every))
    found = len(every) - well - errors
    counts = (
        f"{well} well, {found} with findings, {errors} with errors" if well < len(every) else "all is well"
    )
    return f"{plural(len(every), 'path')}: {counts}"


def _described(found: Check) -> dict[str, object]:
    named = [dict(zip(("finding", "where", "what"), problem, strict=True)) for problem in found.problems]
    return {"ok": found.ok, "findings": named}
