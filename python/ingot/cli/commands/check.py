"""``ingot check``: what files should not be like, though they can be read."""

from __future__ import annotations

import os
from hashlib import sha1
from typing import NamedTuple

import click

from ingot import _native
from ingot._native import is_url, shown_url
from ingot._read import digest, door
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import Source, opened
from ingot.cli.spoken import status, told
from ingot.cli.tables import Column
from ingot.cli.wording import plural, shown
from ingot.errors import HeaderError, SafetensorError

from .stats import statistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    # What kind of thing, the file or the tensor, and what is the matter with it.
    Finding = tuple[str, str, str]

_COLUMNS = (Column("finding"), Column("where"), Column("what"))

# What is read at addresses of its own size, in bytes. Elements of other dtypes lie anywhere.
_ALIGNMENT = {2: ("I16", "U16", "F16", "BF16"), 4: ("I32", "U32", "F32", "C64"), 8: ("F64", "I64", "U64")}
_ALIGNMENT_OF = {dtype: size for size, dtypes in _ALIGNMENT.items() for dtype in dtypes}


# Hexadecimal digits of a SHA-1.
_GIT_DIGITS = 40


class Checked(NamedTuple):
    """What was found at one path."""

    path: str
    """Without what is secret."""
    tensors: int
    findings: list[Finding]
    status: int
    """What a command that checks this path alone exits with."""


@click.command(short_help="Find what is wrong, or only odd, with files.")
@arguments.several
@click.option(
    "--values", is_flag=True, help="Read the tensors: NaN, infinities, and BOOL that is neither 0 nor 1."
)
@printing
def command(screen: Screen, paths: tuple[str, ...], values: bool) -> int:
    """Find what is wrong, or only odd, with files. Exits with 1 where something is found.

    The header is held against all rules of the format, also those that readers pass over (FORMAT.md,
    "Leniency"), and tensors must be aligned to their elements. A file that breaks a rule outright is
    refused, as every command refuses it. Files in the Hugging Face cache are compared with the digests in
    their names.

    Several paths are all checked, whatever is found. One that is refused or cannot be opened has an error for
    a finding, and the greatest exit status counts: 2 where a path cannot be opened. --quiet prints the paths
    at which something was found.
    """
    first, *others = paths
    if others:
        return _several(screen, paths, values)
    found = _checked(screen, first, values)
    screen.answer(_described(found))
    if found.findings:
        screen.table(_COLUMNS, found.findings)
    else:
        screen.say(_well(found, values))
    return found.status


def _several(screen: Screen, paths: Sequence[str], values: bool) -> int:
    every = []
    for path in paths:
        try:
            found = _checked(screen, path, values)
        except (SafetensorError, OSError) as error:
            found = _failed(path, error)
        # At once: the next path may take long.
        _tell(screen, found, values)
        every.append(found)
    ok = not any(found.findings for found in every)
    screen.answer({"ok": ok, "paths": [{"path": found.path, **_described(found)} for found in every]})
    screen.say(_summary(every))
    return max(found.status for found in every)


def _checked(screen: Screen, path: str, values: bool) -> Checked:
    source = opened(path)
    findings = [*_strictness(source), *_alignment(source), *_index(source), *_blobs(screen, source)]
    if values:
        findings += _values(screen, source)
    return Checked(source.path, len(source.handle), findings, 1 if findings else 0)


def _failed(path: str, error: SafetensorError | OSError) -> Checked:
    name = shown_url(path)
    what = told(error, [path]).removeprefix(f"{shown(name)}: ")
    return Checked(name, 0, [("error", name, what)], status(error))


def _tell(screen: Screen, found: Checked, values: bool) -> None:
    if screen.quiet and found.findings:
        screen.result(shown(found.path))
    for finding, where, what in found.findings:
        place = found.path if where == found.path else f"{found.path}: {where}"
        screen.say(shown(f"{place}: {finding}: {what}"))
    if not found.findings:
        screen.say(_well(found, values))


def _well(found: Checked, values: bool) -> str:
    tensors = plural(found.tensors, "tensor")
    return f"{shown(found.path)}: {tensors}{'' if values else ', values not read'}: all is well"


def _summary(every: Sequence[Checked]) -> str:
    errors = sum(any(finding == "error" for finding, _, _ in found.findings) for found in every)
    well = sum(not found.findings for found in every)
    found = len(every) - well - errors
    counts = (
        f"{well} well, {found} with findings, {errors} with errors" if well < len(every) else "all is well"
    )
    return f"{plural(len(every), 'path')}: {counts}"


def _described(found: Checked) -> dict[str, object]:
    named = [dict(zip(("finding", "where", "what"), finding, strict=True)) for finding in found.findings]
    return {"ok": not found.findings, "findings": named}


def _strictness(source: Source) -> Iterator[Finding]:
    for file in source.files:
        try:
            door.open_checkpoint(file, "pread", "refuse")
        except HeaderError as error:
            if error.code != "not-strict":
                raise
            name = shown_url(file)
            yield "not-strict", name, str(error).removeprefix(f"{shown(name)}: ")


def _alignment(source: Source) -> Iterator[Finding]:
    for checkpoint, _ in source.checkpoints():
        infos = checkpoint.infos()
        # The data ends where the file does.
        start = checkpoint.nbytes - max((info.end for info in infos), default=0)
        for info in infos:
            size = _ALIGNMENT_OF.get(info.dtype, 1)
            if (start + info.begin) % size:
                what = f"{info.dtype} begins at byte {start + info.begin}, which {size} does not divide"
                yield "misaligned", info.name, what


def _index(source: Source) -> Iterator[Finding]:
    totals = source.handle.wrong_total()
    if totals is not None:
        yield "total-size", source.path, f"the index says {totals[0]} bytes, the tensors take {totals[1]}"


def _blobs(screen: Screen, source: Source) -> Iterator[Finding]:
    for file in filter(None, [source.index, *source.files]):
        expected = None if is_url(file) else _native.blob_digest(file)
        if expected is None:
            continue
        found = _git_digest(file) if len(expected) == _GIT_DIGITS else _sha256(screen, file)
        if found != expected.lower():
            yield "blob", shown_url(file), f"its name in the cache is {expected}, its contents have {found}"


def _sha256(screen: Screen, file: str) -> str:
    with bar(screen, "Hashing") as tell:
        return digest.hash(file, "sha256", progress=tell)


def _git_digest(file: str) -> str:
    """The SHA-1 by which Git names a file, as the Hub does for files outside of its large file storage."""
    with open(file, "rb") as opened_file:
        found = sha1(b"blob %d\0" % os.fstat(opened_file.fileno()).st_size, usedforsecurity=False)
        while piece := opened_file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _values(screen: Screen, source: Source) -> Iterator[Finding]:
    for name, found in statistics(screen, source, None).items():
        if found is None:
            yield "unread", name, "how 6-bit values are packed is not settled"
            continue
        if found.nans:
            yield "nan", name, f"{found.nans:,} of {plural(found.count, 'value')}"
        if found.infinities:
            yield "infinity", name, f"{found.infinities:,} of {plural(found.count, 'value')}"
        if found.malformed:
            yield (
                "malformed-bool",
                name,
                f"{found.malformed:,} of {plural(found.count, 'value')} are neither 0 nor 1",
            )
