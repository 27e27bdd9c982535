"""``ingot verify``: whether the bytes are those that were written."""

from __future__ import annotations

import click

from ingot._native import shown_url
from ingot._read import digest
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import opened, size_on_disk
from ingot.cli.wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._read.digest import Compared, Verification


@click.command(short_help="Compare the tensors with the digests that the file keeps.")
@arguments.several
@click.option("--sha256", "expected", metavar="DIGEST", help="The SHA-256 of the whole file, for one PATH.")
@printing
def command(screen: Screen, paths: tuple[str, ...], expected: str | None) -> int:
    """Compare the bytes with digests; exits with 1 unless every byte is vouched for.

    The digests are those that `save_file(checksums=...)` keeps in the metadata, the hash of ModelSpec, and
    the one of --sha256. Files in the Hugging Face cache are compared with the SHA-256 in their names. A file
    without any digest is not ok.
    """
    files = [file for path in paths for file in opened(path).files]
    if expected is not None and len(files) != 1:
        raise click.UsageError("--sha256 is for one file")
    reports = {}
    with bar(screen, "Verifying") as tell:
        sizes = list(map(size_on_disk, files))
        steps = Several(tell, sum(sizes))
        for file, size in zip(files, sizes, strict=True):
            with steps.within(size) as within:
                reports[shown_url(file)] = digest.verify(
                    file, expected_sha256=expected, raises=False, progress=within
                )
    screen.answer({"ok": all(reports.values()), "files": [_described(*one) for one in reports.items()]})
    for file, report in reports.items():
        # Tensors without a digest of their own are no news where one vouches for all of them.
        told = report._lines()[: 1 if report.ok else None]
        for line in told:
            screen.say(f"{shown(file)}: {line}")
    return 0 if all(reports.values()) else 1


def _described(file: str, report: Verification) -> dict[str, object]:
    return {
        "file": file,
        "ok": report.ok,
        "algorithm": report.algorithm,
        "checked": report.checked,
        "bad": [mismatch._asdict() for mismatch in report.bad],
        "unchecked": report.unchecked,
        "missing": report.missing,
        "modelspec": _compared(report.modelspec),
        "sha256": _compared(report.file),
    }


def _compared(pair: Compared | None) -> dict[str, object] | None:
    return None if pair is None else pair._asdict()
