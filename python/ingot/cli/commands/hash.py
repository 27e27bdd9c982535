"""``ingot hash``: the hashes that people publish of files."""

from __future__ import annotations

import os
from typing import Any

import click

from ingot import _native
from ingot._base.progress import Several
from ingot._read import digest as _digest
from ingot.cli import arguments
from ingot.cli.screen import Column, OfEach, Screen, bar, csv, printing
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
    named = OfEach(screen, models_of(paths), _files)
    files = [file for _, found in named.found for file in found]
    with bar(screen, "Hashing") as tell:
        sizes = {file: _size(file) for file in files}
        steps = Several(tell, sum(map(sizes.__getitem__, files)) * len(chosen))

        def digests(file: str) -> list[str]:
            return [_digest.hash(file, name, progress=steps.step(sizes[file])) for name in chosen]

        hashed = OfEach(screen, files, digests)
    rows = [
        (algorithm, digest, _native.shown_url(file))
        for file, found in hashed.found
        for algorithm, digest in zip(chosen, found, strict=True)
    ]
    described = [{"file": file, "algorithm": name, "digest": digest} for name, digest, file in rows]
    screen.answer({"hashes": [*described, *named.errors, *hashed.errors]})
    if screen.quiet:
        for _, digest, _ in rows:
            screen.result(digest)
    else:
        screen.table((Column("algorithm", whole=True), Column("digest", whole=True), Column("file")), rows)
    return max(named.status, hashed.status)


def _files(model: str) -> list[str]:
    # Any file can be hashed, so only a directory or an index is opened.
    return opened(model).files if os.path.isdir(model) or model.endswith(".index.json") else [model]


def _size(file: str) -> int:
    # The work on the file reports that it is missing.
    try:
        return size_on_disk(file)
    except OSError:
        return 0
