"""``ingot merge``: several files as one."""

from __future__ import annotations

import click

from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import opened
from ingot.cli.wording import nbytes, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from ingot._base.checks import Existing


@arguments.command(short_help="Merge several files, or a sharded checkpoint, into one file.")
@arguments.several
@arguments.output("The file to write: .safetensors, or .bt for bintensors.", required=True)
@click.option(
    "--on-duplicate",
    type=click.Choice(["error", "first", "last"]),
    default="error",
    show_default=True,
    help="If several files have a tensor of one name: fail, or keep the first or the last.",
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
    """Merge several files, or the files of a sharded checkpoint, into one file.

    Tensors are copied byte by byte.
    """
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
    tensors, of = plural(len(infos), "tensor"), plural(len(files), "file")
    screen.wrote(dry_run, output, f"{tensors}, {nbytes(size)} of {of}")
    return 0
