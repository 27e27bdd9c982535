"""``ingot view``: a model in a browser."""

from __future__ import annotations

import os
from shlex import quote

import click

from ingot.cli import arguments
from ingot.cli.screen import Screen, bar, nbytes, printing, shown
from ingot.cli.sources import models_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot._view.shelf import Shelf

# The number of models that an error names.
_NAMED = 5


@arguments.command(short_help="Show a model, or compare two, in a browser.")
@arguments.place("paths", "[PATH]...", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve at this port of 127.0.0.1.  [default: a free one]",
)
@click.option("--no-browser", is_flag=True, help="Print the address, and do not open a browser.")
@arguments.file_option("--html", metavar="FILE", help="Write a report to FILE instead.")
@arguments.existing
@printing
def command(
    screen: Screen,
    paths: tuple[str, ...],
    port: int | None,
    no_browser: bool,
    html: str | None,
    existing: Existing,
) -> int:
    """Show the model at PATH in a browser, or compare two models side by side. Stop with Ctrl-C.

    A PATH is a file, a sharded checkpoint or a URL. The command serves the viewer at 127.0.0.1, prints the
    address and opens it. Only this machine can reach the address, which contains a secret token. No data is
    sent elsewhere, and credentials for URLs do not reach the browser.

    --html writes a report with headers, statistics and thumbnails to a file, which a browser opens without
    this command. Without a PATH, --html writes the viewer itself, in which you can drop files.
    """
    for path in paths:
        _refuse_several(path)
    if html is None:
        arguments.needs("--overwrite", "--html", not existing.overwrite)
    else:
        arguments.exclude("--port", "--html", port is not None)
        arguments.exclude("--no-browser", "--html", no_browser)
        _write(screen, paths, html, existing)
        return 0
    if not 1 <= len(paths) <= 2:
        raise click.UsageError(f"expected one PATH, or two to compare, found {len(paths)}")
    from ingot._view.shelf import Shelf

    shelf = Shelf(paths)
    try:
        _serve(screen, shelf, port or 0, no_browser)
    finally:
        shelf.close()
    return 0


def _refuse_several(path: str) -> None:
    """Refuse a directory of several models. The page shows one model, or two."""
    models = models_of([path])
    if len(models) < 2:
        return
    names = [f"`{shown(os.path.basename(model))}`" for model in models]
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    one, every = (shown(quote(word)) for word in (models[0], path))
    raise click.UsageError(
        f"{shown(path)}: is a directory of {len(models)} models, and a page shows one, or two to compare: "
        f"{', '.join(names[:_NAMED])}{rest}: "
        f"type `ingot view {one}`, or `ingot {every}` for a table of all"
    )


def _wait() -> None:
    """Wait for Ctrl-C."""
    from threading import Event

    from ingot._base.waits import wait_for

    wait_for(Event().wait)


def _write(screen: Screen, paths: tuple[str, ...], html: str, existing: Existing) -> None:
    if len(paths) > 1:
        raise click.UsageError(f"expected one PATH, or none, for --html, found {len(paths)}")
    from ingot._view import report
    from ingot._view.shelf import opened

    target = arguments.target(html, existing)
    with bar(screen, "Reading") as tell:
        text = report.page(*([report.made(opened(paths[0]), tell)] if paths else [])).encode()
    existing.write(target, [text])
    screen.answer({"file": html, "nbytes": len(text)})
    screen.say(f"{shown(html)}: {nbytes(len(text))}")


def _serve(screen: Screen, shelf: Shelf, port: int, no_browser: bool) -> None:
    from contextlib import suppress

    from ingot._view.server import Server

    server = Server(shelf, port)
    try:
        # Ctrl-C ends the server, and may come as soon as the address is printed.
        with suppress(KeyboardInterrupt):
            screen.answer({"url": server.url})
            screen.result(server.url)
            screen.out.flush()
            if not no_browser:
                import webbrowser

                webbrowser.open(server.ticket())
            _wait()
    finally:
        server.close()
