"""``ingot download``: a local copy of a remote file or model."""

from __future__ import annotations

import click

from ingot._write import download
from ingot.cli import arguments
from ingot.cli.screen import Column, nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.cli.arguments import Output
    from ingot.cli.screen import Screen


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
    to: Output, source: str, destination: str, expected_sha256: str | None, threads: int | None
) -> int:
    """Download the file or the model at URL to DESTINATION.

    URL begins with https://, http://, hf://, s3://, gs://, az:// or file://. If DESTINATION is a directory or
    ends in a slash, the file keeps its name. The URL of an index (*.index.json), or of a Hub repository with
    an index and no model.safetensors, downloads the index and all of its files.

    Run the command again to resume an interrupted download. A file whose SHA-256 differs from
    --expected-sha256, or from the digest that the Hub has, is not kept.
    """
    if to.dry_run:
        files = download.planned(
            source, destination, expected_sha256=expected_sha256, **to.existing._asdict()
        )
        to.answer({"files": [{"path": name, "nbytes": size} for name, size in files]})
        _tell(to.screen, files, "would fetch")
        return 0
    with to.saving("Downloading") as how:
        done = download.download(source, destination, expected_sha256=expected_sha256, threads=threads, **how)
    to.answer({**done._asdict(), "files": done.files})
    if to.screen.quiet:
        to.screen.result(shown(done.path))
    else:
        network = "" if done.fetched == done.nbytes else f", {nbytes(done.fetched)} of it over the network"
        _tell(to.screen, [(file.path, file.nbytes) for file in done.files], "wrote", network)
    return 0


def _tell(screen: Screen, files: list[tuple[str, int]], what: str, network: str = "") -> None:
    size_text = nbytes if screen.is_terminal else str
    rows = [(name, size_text(size)) for name, size in files]
    screen.table((Column("file"), Column("size", right=True)), rows)
    if screen.is_terminal:
        total = nbytes(sum(size for _, size in files))
        screen.say(f"{what} {plural(len(files), 'file')}: {total}{network}")
