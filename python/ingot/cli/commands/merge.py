"""``ingot merge``: several files as one."""

from __future__ import annotations

import click

from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import opened
from ingot.cli.wording import nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from ingot._base.checks import Existing


@click.command(short_help="Make one file of several, or of a checkpoint.")
@arguments.several
@arguments.output("The file to write. `.bt` writes bintensors.", required=True)
@click.option(
    "--on-duplicate",
    type=click.Choice(["error", "first", "last"]),
    default="error",
    show_default=True,
    help="What to do with a name that several have.",
)
@arguments.writing
@printing
def command(
    screen: Screen,
    paths: tuple[str, ...],
    output: str,
    on_duplicate: Literal["error", "first", "last"],
    existing: Existing,
    dry_run: bool,
) -> int:
    """Make one file of several, or of the files of a checkpoint. Bytes are copied, no tensor is decoded."""
    sources = [opened(path) for path in paths]
    files = [file for source in sources for file in source.files]
    arguments.target(output, existing)
    if not dry_run:
        with bar(screen, "Merging") as tell:
            rearrange.merge(paths, output, on_duplicate=on_duplicate, **existing.options(), progress=tell)
    infos = {info.name: info for source in sources for info in source.infos()}
    size = sum(info.nbytes for info in infos.values())
    screen.answer(
        {"dry_run": dry_run, "file": output, "sources": files, "tensors": len(infos), "nbytes": size}
    )
    done = "would write" if dry_run else "wrote"
    tensors, of = plural(len(infos), "tensor"), plural(len(files), "file")
    screen.say(f"{done} {shown(output)}: {tensors}, {nbytes(size)} of {of}")
    return 0
