"""``ingot verify``: whether the bytes are those that were written."""

from __future__ import annotations

from ingot._native import shown_url
from ingot._read.digest import Verification, verify
from ingot.cli import arguments
from ingot.cli.screen import Screen, bar, printing, shown


@arguments.command(short_help="Compare files with their digests.")
@arguments.several
@arguments.expected_sha256("The SHA-256 of the whole file, if there is one file.")
@printing
def command(screen: Screen, paths: tuple[str, ...], expected_sha256: str | None) -> int:
    """Compare files with their digests. The exit status is 1 unless all bytes have a digest that matches.

    Digests come from the metadata (`save_file(checksums=...)`, or modelspec.hash_sha256), from the name of a
    file in the Hugging Face cache, and from --expected-sha256. A file without a digest fails.
    """
    if len(paths) > 1:
        arguments.exclude("--expected-sha256", "several files", expected_sha256)
    reports: list[Verification] = []
    for path in paths:
        with bar(screen, "Verifying") as tell:
            found = verify(path, expected_sha256=expected_sha256, raises=False, progress=tell)
        reports.append(found)
        for source, report in (found.shards or {shown_url(path): found}).items():
            # The other lines are about tensors without a digest, which do not matter if the file has one.
            for line in report._lines()[: 1 if report.ok else None]:
                screen.say(f"{shown(source)}: {line}")
    screen.reports(reports)
    return 0 if all(reports) else 1
