"""``ingot split``: one file as several and an index."""

from __future__ import annotations

import os

import click

from ingot._base.checks import checked_shard_size
from ingot._write import rearrange
from ingot._write import shards as _shards
from ingot.cli import arguments
from ingot.cli.screen import Column, nbytes, plural
from ingot.cli.sources import opened


@arguments.command(short_help="Split a file into several files and an index.")
@arguments.source
@arguments.destination
@arguments.max_shard_size("The most bytes of tensors in a file.", "5GB")
@click.option(
    "--filename-pattern",
    metavar="TEXT",
    default="model{suffix}.safetensors",
    show_default=True,
    help="The file names. {suffix} becomes -00001-of-00003.",
)
@arguments.writing
def command(
    to: arguments.Output, path: str, destination: str, max_shard_size: int | str, filename_pattern: str
) -> int:
    """Split SOURCE into several files and an index, as huggingface_hub does, in the directory DESTINATION.

    --overwrite replaces the checkpoint in DESTINATION.
    """
    source = opened(path)
    place = _shards.Place(destination, filename_pattern)
    sizes = [info.nbytes for info in source.infos()]
    limit = checked_shard_size(max_shard_size)
    shards = _shards.split(sizes, limit)
    place.check(to.existing)
    if not to.dry_run:
        with to.saving("Splitting") as how:
            rearrange.split(path, destination, limit, filename_pattern=filename_pattern, **how)
    files = [
        (os.path.join(destination, name), len(shard), sum(sizes[number] for number in shard))
        for name, shard in zip(place.names(len(shards)), shards, strict=True)
    ]
    described = [{"file": name, "tensors": tensors, "nbytes": size} for name, tensors, size in files]
    to.answer({"files": described})
    columns = (Column("file"), Column("tensors", right=True), Column("size", right=True))
    size_text = nbytes if to.screen.is_terminal else str
    to.screen.table(columns, [(name, str(tensors), size_text(size)) for name, tensors, size in files])
    if to.screen.is_terminal:
        to.wrote(destination, plural(len(files), "file"))
    return 0
