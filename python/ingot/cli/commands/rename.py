"""``ingot rename``: the same tensors under other names."""

from __future__ import annotations

import re

import click

from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing, warn
from ingot.cli.sources import opened
from ingot.cli.tables import Column
from ingot.cli.wording import plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingot._base.checks import Existing

_COLUMNS = (Column("old"), Column("new"))


@click.command(short_help="Write the tensors under other names.")
@arguments.source
@arguments.destination
@click.option("-n", "--name", "pairs", nargs=2, multiple=True, metavar="OLD NEW", help="One tensor.")
@click.option(
    "-s",
    "--sub",
    "subs",
    nargs=2,
    multiple=True,
    metavar="REGEX TEXT",
    help=r"Whatever is found; \1 is its group 1.",
)
@arguments.writing
@printing
def command(
    screen: Screen,
    path: str,
    destination: str,
    pairs: tuple[tuple[str, str], ...],
    subs: tuple[tuple[str, str], ...],
    existing: Existing,
    dry_run: bool,
) -> int:
    """Write the tensors of SOURCE to DESTINATION under other names: bytes are copied, none is decoded."""
    if not pairs and not subs:
        raise click.UsageError("expected --name OLD NEW or --sub REGEX TEXT")
    source = opened(path)
    names = [info.name for info in source.in_natural_order()] + list(source.handle.shared())
    for old in {old for old, _ in pairs} - set(names):
        source.handle.info(old)
    table = _renamed(names, dict(pairs), subs)
    arguments.target(destination, existing)
    if not dry_run:
        with bar(screen, "Writing") as tell:
            rearrange.rewrite(path, destination, rename=table or None, **existing.options(), progress=tell)
    if not table:
        warn(f"{shown(path)}: no tensor is renamed: the names and patterns change no name")
    screen.answer({"dry_run": dry_run, "file": destination, "renamed": table})
    screen.table(_COLUMNS, list(table.items()))
    if screen.is_terminal:
        done = "would write" if dry_run else "wrote"
        screen.say(f"{done} {shown(destination)}: {plural(len(table), 'tensor')} of {len(names):,} renamed")
    return 0


def _renamed(names: list[str], pairs: dict[str, str], subs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """New names for the old ones that change; two that would be one are refused."""
    compiled = [(arguments.pattern(regex), text) for regex, text in subs]
    new_names: dict[str, str] = {}
    for name in names:
        new = pairs.get(name, name)
        for regex, text in compiled:
            assert regex is not None
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
