"""``ingot hash``: the hashes that people publish of files."""

from __future__ import annotations

import os
from typing import Any

import click

from ingot import _native
from ingot._read import digest as _digest
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import opened, size_on_disk
from ingot.cli.tables import Column


@click.command(short_help="The hashes of files: SHA-256, BLAKE3, AutoV1 to AutoV3, ….")
@arguments.several
@click.option(
    "-a",
    "--algorithm",
    "algorithms",
    multiple=True,
    default=("sha256",),
    show_default=True,
    help=f"One of {', '.join(_native.hashes())}, or a name that Python's hashlib knows. May be given again.",
)
@click.option("--all", "everything", is_flag=True, help="All of those named above.")
@printing
def command(screen: Screen, paths: tuple[str, ...], algorithms: tuple[str, ...], everything: bool) -> int:
    """Print hashes: algorithm, digest and file.

    sha256, blake3, xxh3 and xxh3_128 are those of the whole file; so are autov1 (A1111's old one) and autov2
    (Civitai). autov3 (also sshs_model_hash), sshs_legacy and modelspec are those of the tensors alone, which
    changes of the metadata leave as they are. Of a checkpoint of many files, one hash for each file.
    """
    # The command line has checked them.
    chosen: Any = tuple(_native.hashes()) if everything else algorithms
    files = [file for path in paths for file in _files(path)]
    rows = []
    with bar(screen, "Hashing") as tell:
        sizes = list(map(size_on_disk, files))
        steps = Several(tell, sum(sizes) * len(chosen))
        for file, size in zip(files, sizes, strict=True):
            for algorithm in chosen:
                with steps.within(size) as within:
                    rows.append((algorithm, _digest.hash(file, algorithm, progress=within), file))
    rows = [(algorithm, digest, _native.shown_url(file)) for algorithm, digest, file in rows]
    described = [{"file": file, "algorithm": name, "digest": digest} for name, digest, file in rows]
    screen.answer({"hashes": described})
    if screen.quiet:
        for _, digest, _ in rows:
            screen.result(digest)
    else:
        screen.table((Column("algorithm", whole=True), Column("digest", whole=True), Column("file")), rows)
    return 0


def _files(path: str) -> list[str]:
    # Any file has a hash, so only what is a directory or an index is opened.
    return opened(path).files if os.path.isdir(path) or path.endswith(".index.json") else [path]
