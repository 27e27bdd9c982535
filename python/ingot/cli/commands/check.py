"""``ingot check``: what a file should not be like, though it can be read."""

from __future__ import annotations

import click

from ingot import _open
from ingot._native import shown_url
from ingot.cli import arguments
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import Source, opened
from ingot.cli.tables import Column
from ingot.cli.wording import plural, shown
from ingot.errors import HeaderError

from .stats import statistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    # What kind of thing, the file or the tensor, and what is the matter with it.
    Finding = tuple[str, str, str]

_COLUMNS = (Column("finding"), Column("where"), Column("what"))

# What is read at addresses of its own size, in bytes. Elements of other dtypes lie anywhere.
_ALIGNMENT = {2: ("I16", "U16", "F16", "BF16"), 4: ("I32", "U32", "F32", "C64"), 8: ("F64", "I64", "U64")}
_ALIGNMENT_OF = {dtype: size for size, dtypes in _ALIGNMENT.items() for dtype in dtypes}


@click.command()
@arguments.path
@click.option(
    "--values", is_flag=True, help="Read the tensors: NaN, infinities, and BOOL that is neither 0 nor 1."
)
@printing
def command(screen: Screen, path: str, values: bool) -> int:
    """Find what is wrong, or only odd, with a file. Exits with 1 where something is found.

    The header is held against all rules of the format, also those that readers pass over (FORMAT.md,
    "Leniency"), and tensors must be aligned to their elements. A file that breaks a rule outright is
    refused, as every command refuses it.
    """
    source = opened(path)
    findings = [*_strictness(source), *_alignment(source), *_index(source)]
    if values:
        findings += _values(screen, source)
    named = [dict(zip(("finding", "where", "what"), finding, strict=True)) for finding in findings]
    screen.answer({"ok": not findings, "findings": named})
    if findings:
        screen.table(_COLUMNS, findings)
    else:
        tensors = plural(len(source.handle), "tensor")
        screen.say(f"{shown(source.path)}: {tensors}{'' if values else ', values not read'}: all is well")
    return 1 if findings else 0


def _strictness(source: Source) -> Iterator[Finding]:
    for file in source.files:
        try:
            _open.open_checkpoint(file, "pread", "refuse")
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
