"""``ingot download``: remote files and models, kept."""

from __future__ import annotations

import click

from ingot._native import is_url
from ingot._write import download
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.tables import Column
from ingot.cli.wording import nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot._write.download import Download


def _remote(context: click.Context, parameter: click.Parameter, given: str) -> str:
    if not is_url(given):
        raise click.UsageError(f"{shown(given)}: is no URL: expected one, such as hf://owner/repo", context)
    return given


@click.command(short_help="Fetch a file, or a model of many, and keep it.")
@click.argument("source", callback=_remote)
@arguments.destination
@click.option("--sha256", "expected", metavar="HEX", help="The SHA-256 that the file has to have.")
@click.option("--threads", type=click.IntRange(1), help="How many parts are fetched at once, 16 by default.")
@arguments.writing
@printing
def command(
    screen: Screen,
    source: str,
    destination: str,
    expected: str | None,
    threads: int | None,
    existing: Existing,
    dry_run: bool,
) -> int:
    """Download the file or the model at the URL SOURCE to DESTINATION.

    Where DESTINATION is a directory, or ends in a slash, the file goes into it. The URL of an index
    (`*.index.json`), and a repository of the Hub that has one and no model.safetensors, brings the index and
    all files that it names. An interrupted download resumes when the command is run again.
    What the Hub says of its files, or --sha256, has to be true of them.
    """
    if dry_run:
        _plan(screen, source, destination, expected, existing)
    else:
        _fetch(screen, source, destination, expected, threads, existing)
    return 0


def _plan(screen: Screen, source: str, destination: str, expected: str | None, existing: Existing) -> None:
    files = download.planned(source, destination, expected_sha256=expected, **existing._asdict())
    screen.answer({"dry_run": True, "files": [{"file": name, "nbytes": size} for name, size in files]})
    _tell(screen, files, "would fetch")


def _fetch(
    screen: Screen,
    source: str,
    destination: str,
    expected: str | None,
    threads: int | None,
    existing: Existing,
) -> None:
    with bar(screen, "Downloading") as tell:
        done = download.download(
            source,
            destination,
            expected_sha256=expected,
            **existing.options(),
            threads=threads,
            progress=tell,
        )
    parts = [_described(file) for file in done.files]
    screen.answer({"dry_run": False, **_described(done), "files": parts})
    _tell_done(screen, done)


def _tell_done(screen: Screen, done: Download) -> None:
    if screen.quiet:
        screen.result(shown(done.path))
        return
    came = "" if done.fetched == done.nbytes else f", {nbytes(done.fetched)} of it over the network"
    _tell(screen, [(file.path, file.nbytes) for file in done.files], "wrote", came)


def _tell(screen: Screen, files: list[tuple[str, int]], what: str, came: str = "") -> None:
    size_text = nbytes if screen.is_terminal else str
    screen.table(
        (Column("file"), Column("size", right=True)), [(name, size_text(size)) for name, size in files]
    )
    if screen.is_terminal and not screen.quiet:
        total = nbytes(sum(size for _, size in files))
        screen.say(f"{what} {plural(len(files), 'file')}: {total}{came}")


def _described(done: Download) -> dict[str, object]:
    return {"file": done.path, "nbytes": done.nbytes, "fetched": done.fetched, "sha256": done.sha256}
