"""``ingot rename``: the same tensors under other names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from ingot._base.keys import NamedTensors, select
from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import Column, plural, shown, warn
from ingot.cli.sources import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.cli.sources import Source
    from ingot.typing import Glob

_COLUMNS = (Column("old"), Column("new"))


@arguments.command(short_help="Copy a file with other names for tensors, or some of them.")
@arguments.source
@arguments.destination
@click.option(
    "-n",
    "--name",
    "pairs",
    nargs=2,
    multiple=True,
    metavar="OLD NEW",
    help="Rename the tensor OLD to NEW. Repeatable.",
)
@click.option(
    "-s",
    "--sub",
    "subs",
    nargs=2,
    multiple=True,
    metavar="REGEX TEXT",
    help=r"Replace what REGEX matches in names by TEXT, in which \1 is group 1. Repeatable.",
)
@arguments.selecting
@arguments.writing
def command(
    to: arguments.Output,
    path: str,
    destination: str,
    pairs: tuple[tuple[str, str], ...],
    subs: tuple[tuple[str, str], ...],
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Copy SOURCE to DESTINATION with other names for tensors, or with some of the tensors.

    Tensors are copied byte by byte. --keys and --drop take the old names.
    """
    if not (pairs or subs or keys or drop):
        raise click.UsageError("expected --name, --sub, --keys or --drop")
    source = opened(path)
    every = [info.name for info in source.in_natural_order()] + list(source.handle.shared())
    kept = {*select(NamedTensors(path, every, tuple), keys, drop)}
    names = [name for name in every if name in kept]
    table = _renamed(names, _pairs(source, names, pairs), subs)
    arguments.target(destination, to.existing)
    if not to.dry_run:
        with to.saving("Writing") as how:
            rearrange.rewrite(path, destination, rename=table or None, keys=keys, drop=drop, **how)
    if not table and (pairs or subs):
        warn(f"{shown(path)}: no tensor is renamed: the names and patterns change no name")
    dropped = [name for name in every if name not in kept]
    to.answer({"destination": destination, "renamed": table, "dropped": dropped})
    to.screen.table(_COLUMNS, list(table.items()))
    left_out = f", {len(dropped):,} left out" if dropped else ""
    to.wrote(destination, f"{plural(len(names), 'tensor')}, {len(table):,} renamed{left_out}")
    return 0


def _pairs(source: Source, names: list[str], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the pairs of ``--name``. Each old name must be selected and given once."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise click.UsageError("--name has the same OLD twice")
    for old in {*table} - {*names}:
        source.handle.info(old)
        raise click.UsageError(f"--name: --keys and --drop do not select the tensor `{shown(old)}`")
    return table


def _renamed(names: list[str], pairs: dict[str, str], subs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the new names of the tensors that change. Two equal new names are an error."""
    compiled = [(arguments.pattern(regex), text) for regex, text in subs]
    new_names: dict[str, str] = {}
    for name in names:
        new = pairs.get(name, name)
        for regex, text in compiled:
            try:
                new = regex.sub(text, new)
            except (re.error, IndexError) as error:
                raise click.UsageError(f"`{shown(text)}`: cannot replace with it: {error}") from None
        new_names[name] = new
    owners: dict[str, str] = {}
    for name, new in new_names.items():
        if owners.setdefault(new, name) != name:
            raise click.UsageError(
                f"`{shown(owners[new])}` and `{shown(name)}` would both be named `{shown(new)}`"
            )
    return {name: new for name, new in new_names.items() if new != name}
