"""``ingot cast``: the same tensors, floats in another dtype."""

from __future__ import annotations

import click

from ingot._write.cast import cast, planned
from ingot.cli import arguments
from ingot.cli.screen import nbytes, plural
from ingot.cli.sources import chosen, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.typing import DtypeName


@arguments.command(short_help="Copy a file with floats in another dtype.")
@arguments.source
@arguments.destination
@click.option("--dtype", required=True, type=arguments.FloatDtype(), help="The new dtype, such as BF16.")
@arguments.keys_option("Convert only these tensors: a name, or a pattern such as 'decoder.*'. Repeatable.")
@click.option(
    "--except",
    "excepted",
    multiple=True,
    metavar="PATTERN",
    shell_complete=arguments.tensor_names,
    help="Keep the dtype of these tensors, such as '*norm*'. Repeatable.",
)
@arguments.writing
def command(
    to: arguments.Output,
    path: str,
    destination: str,
    dtype: DtypeName,
    keys: tuple[str, ...],
    excepted: tuple[str, ...],
) -> int:
    """Copy SOURCE to DESTINATION with floating-point tensors in another dtype.

    The conversion is the same as torch's .to(dtype). Integers, booleans and complex numbers keep their
    dtypes. In a PATTERN, * matches any text and ? one character; each PATTERN must match a tensor. The
    command holds at most 256 MiB, or one tensor, in memory.
    """
    names = _selected(path, keys, excepted)
    arguments.target(destination, to.existing)
    if to.dry_run:
        found = planned(path, destination, dtype, keys=names)
    else:
        with to.saving("Casting") as how:
            found = cast(path, destination, dtype, keys=names, **how)
    to.answer(found)
    converted = f"{plural(len(found.cast), 'tensor')} of {found.tensors:,} cast to {dtype}"
    to.wrote(destination, f"{converted}, {nbytes(found.nbytes)}")
    return 0


def _selected(path: str, keys: tuple[str, ...], excepted: tuple[str, ...]) -> list[str] | None:
    """Return the names that the patterns select. None for all names."""
    if not (keys or excepted):
        return None
    source = opened(path)
    infos = chosen(source, source.infos(), arguments.patterns(keys), arguments.patterns(excepted))
    return [info.name for info in infos]
