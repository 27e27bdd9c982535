"""``ingot export``: tensors as files of their own."""

from __future__ import annotations

import io
import os
from urllib.parse import quote

import click

from ingot._base.progress import Several
from ingot._read.load import RAW
from ingot.cli import arguments
from ingot.cli.screen import bar, nbytes
from ingot.cli.sources import Source, chosen, opened

from .cat import widened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot._native import TensorInfo
    from ingot.typing import Glob

# Bytes that file systems take for a name, with room for numbers and suffixes.
_LONGEST = 200
# Windows takes these names for devices, with any suffix.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10))}


@arguments.command(short_help="Write each tensor to a .npy or raw file.")
@arguments.path
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=arguments.tensor_names)
@arguments.selecting
@click.option("--raw", is_flag=True, help="Write the bytes alone, little-endian, instead of .npy files.")
@arguments.output("Write one tensor to FILE.")
@arguments.file_option(
    "-d", "--directory", metavar="DIR", help="Write the files to DIR.  [default: the current directory]"
)
@arguments.writing
def command(
    to: arguments.Output,
    path: str,
    keys: Glob | None,
    drop: Glob | None,
    raw: bool,
    output: str | None,
    directory: str | None,
) -> int:
    """Write each tensor to a file of its own, which numpy.load reads.

    Each file has the name of its tensor, with %XX for characters that file systems treat specially. A .npy
    file holds bfloat16 and smaller floats as float32, which numpy reads without ml_dtypes.
    """
    if keys is None:
        raise click.UsageError("expected the NAME of a tensor, or --keys")
    if directory is not None:
        arguments.exclude("--directory", "--output", output)
    kind = "bin" if raw else "npy"
    source = opened(path)
    infos = chosen(source, source.infos(), keys, drop)
    if output is not None and len(infos) != 1:
        raise click.UsageError(f"--output takes one tensor, found {len(infos):,}: --directory takes several")
    files = distinct([info.name for info in infos], kind)
    paths = [output] if output is not None else [os.path.join(directory or ".", file) for file in files]
    # All errors are raised before the first file is written.
    targets = [arguments.target(one, to.existing) for one in paths]
    pairs = [*zip(infos, targets, strict=True)]
    if not to.dry_run:
        with bar(to.screen, "Exporting") as tell:
            steps = Several(tell, sum(info.nbytes for info in infos))
            for info, target in pairs:
                to.existing.write(target, _pieces(source, info, kind), steps.step(info.nbytes))
    for info, target in pairs:
        to.wrote(target, nbytes(info.nbytes))
    to.answer({"files": [{"name": info.name, "file": target} for info, target in pairs]})
    return 0


def _pieces(source: Source, info: TensorInfo, kind: str) -> list[Buffer]:
    """Return the contents of the file, in pieces."""
    if kind != "npy":
        return [source.handle.tensor(info.name, RAW)[: info.nbytes]]
    import numpy

    array = numpy.asarray(widened(source.values(info.name)), order="C")
    header = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(header, numpy.lib.format.header_data_from_array_1_0(array))
    return [header.getvalue(), array.reshape(-1).view("u1").data]


def distinct(names: list[str], suffix: str) -> list[str]:
    """Return a file name for each of `names`, all different even if case is ignored."""
    taken: set[str] = set()
    files = []
    for name in names:
        stem = _stem(name)
        file, number = f"{stem}.{suffix}", 1
        while file.lower() in taken:
            number += 1
            file = f"{stem}-{number}.{suffix}"
        taken.add(file.lower())
        files.append(file)
    return files


def _stem(name: str) -> str:
    """Return `name` with %XX for all but the letters and digits of ASCII, ``-``, ``_`` and ``.``."""
    # `quote` does not escape `~`, which a shell expands.
    stem = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    if stem.startswith(".") or not stem:
        # The name must not be hidden, and not name a directory.
        stem = "%2E" + stem[1:] if stem else "%00"
    if stem.partition(".")[0].lower() in _DEVICES:
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if stem.startswith("-"):
        # Other commands would take the file name for an option.
        stem = "%2D" + stem[1:]
    return _cut(stem)


def _cut(stem: str) -> str:
    if len(stem) <= _LONGEST:
        return stem
    cut = stem[:_LONGEST]
    # Do not cut inside %XX.
    return cut[: cut.rindex("%")] if "%" in cut[-2:] else cut
