"""``ingot cast``: the same tensors, floats in another dtype."""

from __future__ import annotations

import click

from ingot._write.cast import cast, planned
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import chosen, opened
from ingot.cli.wording import nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot.typing import DtypeName


@click.command(short_help="Write the tensors with floats in another dtype.")
@arguments.source
@arguments.destination
@click.option("--dtype", required=True, type=arguments.FloatDtype(), help="The new dtype.")
@click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Tensors to convert, such as 'decoder.*'; all by default.",
)
@click.option(
    "--except",
    "excepted",
    multiple=True,
    metavar="PATTERN",
    help="Tensors to leave as they are, such as '*norm*'.",
)
@arguments.writing
@printing
def command(
    screen: Screen,
    path: str,
    destination: str,
    dtype: DtypeName,
    keys: tuple[str, ...],
    excepted: tuple[str, ...],
    existing: Existing,
    dry_run: bool,
) -> int:
    """Write the tensors of SOURCE to DESTINATION with floats converted, as torch's .to(dtype) does it.

    Integers, booleans and complex numbers keep their dtypes. A PATTERN is the name of a tensor, or one with *
    for any text and ? for one character; it has to match a tensor. At most 256 MiB, or one tensor, are in
    memory.
    """
    names = _selected(path, keys, excepted)
    arguments.target(destination, existing)
    if dry_run:
        found = planned(path, destination, dtype, keys=names)
    else:
        with bar(screen, "Casting") as tell:
            found = cast(path, destination, dtype, keys=names, progress=tell, **existing.options())
    facts = {
        "file": destination,
        "dtype": dtype,
        "cast": len(found.cast),
        "tensors": found.tensors,
        "nbytes": found.nbytes,
    }
    screen.answer({"dry_run": dry_run, **facts})
    done = "would write" if dry_run else "wrote"
    told = f"{plural(len(found.cast), 'tensor')} of {found.tensors:,} cast to {dtype}"
    screen.say(f"{done} {shown(destination)}: {told}, {nbytes(found.nbytes)}")
    return 0


def _selected(path: str, keys: tuple[str, ...], excepted: tuple[str, ...]) -> list[str] | None:
    """Return the names that the patterns select; None for all."""
    if not (keys or excepted):
        return None
    infos = chosen(path, opened(path).infos(), arguments.patterns(keys), arguments.patterns(excepted))
    return [info.name for info in infos]
