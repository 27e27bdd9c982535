"""``ingot verify``: whether the bytes are those that were written."""

from __future__ import annotations

from functools import partial

from ingot._native import shown_url
from ingot._read.digest import Verification, verify
from ingot.cli import arguments
from ingot.cli.screen import OfEach, Screen, bar, described, printing, shown
from ingot.cli.sources import models_of


@arguments.command(short_help="Compare files with their digests.")
@arguments.several
@arguments.expected_sha256("The SHA-256 of the whole file, if there is one file.")
@printing
def command(screen: Screen, paths: tuple[str, ...], expected_sha256: str | None) -> int:
    """Compare files with their digests. The exit status is 1 unless all bytes have a digest that matches.

    Digests come from the metadata (`save_file(checksums=...)`, or modelspec.hash_sha256), from the name of a
    file in the Hugging Face cache, and from --expected-sha256. A file without a digest fails.

    With several paths, and for a directory of several models, all of them are compared.
    """
    models = models_of(paths)
    if max(len(paths), len(models)) > 1:
        arguments.exclude("--expected-sha256", "several files", expected_sha256)

    def work(model: str) -> tuple[str, Verification]:
        with bar(screen, "Verifying") as tell:
            return model, verify(model, expected_sha256=expected_sha256, raises=False, progress=tell)

    read = OfEach(screen, models, work, report=partial(_print, screen))
    found = [one for _, (_, one) in read.found]
    screen.answer(described(found[0]) if read.is_single else read.in_order(map(described, found)))
    return max(read.status, 0 if all(found) else 1)


def _print(screen: Screen, verified: tuple[str, Verification]) -> None:
    model, found = verified
    for source, report in (found.shards or {shown_url(model): found}).items():
        # The other lines are about tensors without a digest, which do not matter if the file has one.
        for line in report._lines()[: 1 if report.ok else None]:
            screen.say(f"{shown(source)}: {line}")
