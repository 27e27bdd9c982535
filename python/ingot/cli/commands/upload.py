"""``ingot upload``: a local file or model in a store."""

from __future__ import annotations

import click

from ingot._write import upload
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, nbytes, plural, printing, shown


@arguments.command(short_help="Upload a file, or a model of several files.")
@arguments.own
@click.argument("destination", metavar="URL")
@click.option("--overwrite", is_flag=True, help="Replace existing objects.")
@arguments.dry_run
@printing
def command(screen: Screen, /, path: str, destination: str, overwrite: bool, dry_run: bool) -> int:
    """Upload the file or the model at PATH to URL, byte for byte.

    URL begins with s3:// or az://. If it ends in a slash, it is a folder, and the file keeps its name. For a
    directory, or for an index (*.index.json), the index and all files that it names are uploaded to a folder,
    the index last.

    An object appears when it is complete. Without --overwrite, an existing object stays and is an error.
    """
    if dry_run:
        done = upload.planned(path, destination)
    else:
        with bar(screen, "Uploading") as tell:
            done = upload.upload(path, destination, overwrite=overwrite, progress=tell)
    screen.reports([done])
    if screen.quiet and not dry_run:
        screen.result(shown(done.url))
    else:
        _print(screen, done, "would upload" if dry_run else "uploaded")
    return 0


def _print(screen: Screen, done: upload.Upload, what: str) -> None:
    files = done.files or (done,)
    rows = [(file.url, screen.size(file.nbytes)) for file in files]
    screen.table((Column("object"), Column("size", right=True)), rows)
    if screen.is_terminal:
        screen.say(f"{what} {plural(len(files), 'file')}: {nbytes(done.nbytes)}")
