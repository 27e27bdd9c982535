"""``ingot verify``: whether the bytes are those that were written."""

from __future__ import annotations

import click

from ingot._native import shown_url
from ingot._read import digest
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, described, printing
from ingot.cli.sources import opened, size_on_disk
from ingot.cli.wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._read.digest import Verification


@arguments.command(short_help="Compare the tensors with the digests that the file keeps.")
@arguments.several
@arguments.expected_sha256("The SHA-256 of the whole file, if there is one file.")
@printing
def command(screen: Screen, paths: tuple[str, ...], expected_sha256: str | None) -> int:
    """Compare files with their digests. The exit status is 1 unless all bytes have a digest that matches.

    Digests come from the metadata (`save_file(checksums=...)`, or modelspec.hash_sha256), from the name of a
    file in the Hugging Face cache, and from --expected-sha256. A file without a digest fails.
    """
    files = [file for path in paths for file in opened(path).files]
    if expected_sha256 is not None and len(files) != 1:
        raise click.UsageError(f"--expected-sha256 is the digest of one file, found {len(files)} files")
    reports = {}
    with bar(screen, "Verifying") as tell:
        sizes = list(map(size_on_disk, files))
        steps = Several(tell, sum(sizes))
        for file, size in zip(files, sizes, strict=True):
            with steps.within(size) as within:
                reports[shown_url(file)] = digest.verify(
                    file, expected_sha256=expected_sha256, raises=False, progress=within
                )
    screen.answer({"ok": all(reports.values()), "files": _described(reports)})
    for file, report in reports.items():
        # Tensors without a digest of their own are no news where one vouches for all of them.
        told = report._lines()[: 1 if report.ok else None]
        for line in told:
            screen.say(f"{shown(file)}: {line}")
    return 0 if all(reports.values()) else 1


def _described(reports: dict[str, Verification]) -> list[dict[str, object]]:
    return [{"source": source, **described(report)} for source, report in reports.items()]
