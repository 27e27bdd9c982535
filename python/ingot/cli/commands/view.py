"""``ingot view``: a model in a browser."""

from __future__ import annotations

import click

from ingot.cli import arguments
from ingot.cli.screen import Screen, printing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._view.shelf import Shelf


@click.command(short_help="Look into a model, or compare two, in a browser.")
@click.argument(
    "paths",
    metavar="PATH...",
    nargs=-1,
    required=True,
    callback=arguments.anywhere,
    shell_complete=arguments.paths,
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of 127.0.0.1. One that is free.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open nothing.")
@printing
def command(screen: Screen, paths: tuple[str, ...], port: int, no_browser: bool) -> int:
    """Show the files, checkpoints or URLs PATH in a browser, until Ctrl-C. Two of them are compared.

    The address that is printed is good for this machine only, and for who has the token in it. The page reads
    what it shows, and nothing is sent elsewhere. What is behind a URL is read by this command: credentials do
    not reach the browser.
    """
    if len(paths) > 2:
        raise click.UsageError(f"expected one PATH, or two to compare, found {len(paths)}")
    from ingot._view.shelf import Shelf

    shelf = Shelf(paths)
    try:
        _serve(screen, shelf, port, no_browser)
    finally:
        shelf.close()
    return 0


def _serve(screen: Screen, shelf: Shelf, port: int, no_browser: bool) -> None:
    from contextlib import suppress
    from threading import Event

    from ingot._view.server import Server

    server = Server(shelf, port)
    try:
        screen.answer({"url": server.url})
        screen.result(server.url)
        screen.out.flush()
        if not no_browser:
            import webbrowser

            webbrowser.open(server.ticket())
        # Ctrl-C is how it ends.
        with suppress(KeyboardInterrupt):
            Event().wait()
    finally:
        server.close()
