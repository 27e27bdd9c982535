"""``ingot hash``: the hashes that people publish of files."""

from __future__ import annotations

import os
from typing import Any

import click

from ingot import _native
from ingot._base.progress import Several
from ingot._read import digest as _digest
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, csv, printing
from ingot.cli.sources import models_of, opened, size_on_disk


@arguments.command(short_help="Print hashes of files: SHA-256, BLAKE3, AutoV1 to AutoV3, …")
@arguments.several
@click.option(
    "-a",
    "--algorithm",
    "algorithms",
    multiple=True,
    metavar="NAME",
    help=f"{', '.join(_digest.HASHES)}, or one of Python's hashlib. Repeatable.  [default: sha256]",
)
@click.option("--all", "everything", is_flag=True, help="Print all hashes that --algorithm lists.")
@csv
@printing
def command(screen: Screen, paths: tuple[str, ...], algorithms: tuple[str, ...], everything: bool) -> int:
    """Print the hashes of files: algorithm, digest and file.

    sha256, blake3, xxh3, xxh3_128, autov1 (the old hash of A1111), autov2 (Civitai), crc32 and the hashes of
    hashlib are hashes of whole files. autov3 (also called sshs_model_hash), autov3_short (its first 12
    digits, as A1111 and Civitai print them), sshs_legacy and modelspec are hashes of the tensors only, and
    do not change with the metadata. A sharded checkpoint has a hash for each of its files, and a directory
    of several models for each model.
    """
    if everything:
        arguments.exclude("--algorithm", "--all", algorithms)
    # The function checks them.
    chosen: Any = _digest.HASHES if everything else algorithms or ("sha256",)
    files = [file for path in paths for file in _files(path)]
    rows = []
    with bar(screen, "Hashing") as tell:
        sizes = list(map(size_on_disk, files))
        steps = Several(tell, sum(sizes) * len(chosen))
        for file, size in zip(files, sizes, strict=True):
            for algorithm in chosen:
                digest = _digest.hash(file, algorithm, progress=steps.step(size))
                rows.append((algorithm, digest, file))
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
    # Any file can be hashed, so only a directory or an index is opened.
    if not (os.path.isdir(path) or path.endswith(".index.json")):
        return [path]
    return [file for model in models_of([path]) for file in opened(model).files]
