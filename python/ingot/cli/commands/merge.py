"""``ingot merge``: several files as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import nbytes, plural, shown
from ingot.cli.sources import opened
from ingot.errors import SaveError

if TYPE_CHECKING:
    from ingot._native import TensorInfo
    from ingot.cli.sources import Source


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
def command(
    to: arguments.Output, paths: tuple[str, ...], output: str, on_duplicate: Literal["error", "first", "last"]
) -> int:
    """Merge several files, or the files of a sharded checkpoint, into one file.

    Tensors are copied byte by byte.
    """
    sources = [opened(path) for path in paths]
    files = [file for source in sources for file in source.files]
    infos = _merged(sources, on_duplicate)
    arguments.target(output, to.existing)
    if not to.dry_run:
        with to.saving("Merging") as how:
            rearrange.merge(paths, output, on_duplicate=on_duplicate, **how)
    size = sum(info.nbytes for info in infos.values())
    to.answer({"destination": output, "sources": files, "tensors": len(infos), "nbytes": size})
    tensors, of = plural(len(infos), "tensor"), plural(len(files), "file")
    to.wrote(output, f"{tensors}, {nbytes(size)} of {of}")
    return 0


def _merged(sources: list[Source], on_duplicate: str) -> dict[str, TensorInfo]:
    """Return the tensors of the new file by name."""
    infos: dict[str, TensorInfo] = {}
    owners: dict[str, Source] = {}
    for source in sources:
        for info in source.infos():
            if info.name not in infos or on_duplicate == "last":
                infos[info.name], owners[info.name] = info, source
            elif on_duplicate == "error":
                first = shown(owners[info.name].path)
                raise SaveError(
                    f"{first} and {shown(source.path)} both have the tensor `{shown(info.name)}`: "
                    "--on-duplicate first or last keeps one",
                    code="duplicate-tensor",
                    tensor=info.name,
                )
    return infos
