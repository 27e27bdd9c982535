"""``ingot download``: a local copy of a remote file or model."""

from __future__ import annotations

import click

from ingot._write import download
from ingot.cli import arguments
from ingot.cli.screen import Column, nbytes, plural, shown


@arguments.command(short_help="Download a file, or a model of several files.")
@click.argument("source", metavar="URL")
@arguments.destination
@arguments.expected_sha256("Fail unless the file has this SHA-256.")
@click.option(
    "--threads",
    type=click.IntRange(1),
    metavar="N",
    help="Download N parts at once.  [default: 16]",
)
@arguments.writing
def command(
    to: arguments.Output, source: str, destination: str, expected_sha256: str | None, threads: int | None
) -> int:
    """Download the file or the model at URL to DESTINATION.

    URL begins with https://, http://, hf://, s3://, gs://, az:// or file://. If DESTINATION is a directory or
    ends in a slash, the file keeps its name. The URL of an index (*.index.json), or of a Hub repository with
    an index and no model.safetensors, downloads the index and all of its files.

    Run the command again to resume an interrupted download. A file whose SHA-256 differs from
    --expected-sha256, or from the digest that the Hub has, is not kept.
    """
    if to.dry_run:
        done = download.planned(source, destination, expected_sha256=expected_sha256, **to.existing._asdict())
    else:
        with to.saving("Downloading") as how:
            done = download.download(
                source, destination, expected_sha256=expected_sha256, threads=threads, **how
            )
    to.answer(done)
    if to.screen.quiet and not to.dry_run:
        to.screen.result(shown(done.path))
    else:
        _print(to, done)
    return 0


def _print(to: arguments.Output, done: download.Download) -> None:
    files = done.files or (done,)
    rows = [(file.path, to.screen.size(file.nbytes)) for file in files]
    to.screen.table((Column("file"), Column("size", right=True)), rows)
    if to.screen.is_terminal:
        what = "would fetch" if to.dry_run else "wrote"
        network = "" if done.fetched == done.nbytes else f", {nbytes(done.fetched)} of it over the network"
        to.screen.say(f"{what} {plural(len(files), 'file')}: {nbytes(done.nbytes)}{network}")
