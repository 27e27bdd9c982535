"""``ingot convert``: files of other formats as files of tensors."""

from __future__ import annotations

import click

from ingot import _convert
from ingot._convert.destination import Destination
from ingot._convert.formats import FORMATS, resolved
from ingot._native import is_url
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.tables import Column
from ingot.cli.wording import nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot._convert import Conversion
    from ingot.typing import DtypeName, Glob, SourceFormat


@click.command(short_help="Make a file of tensors of a file of another format.")
@arguments.source
@arguments.destination
@click.option(
    "--source-format", type=click.Choice(tuple(FORMATS)), help="What SOURCE is, where it cannot be seen."
)
@click.option("--dtype", type=arguments.FloatDtype(), help="Cast floats to it.")
@click.option("--max-shard-size", metavar="SIZE", help="Write several files and an index: 5GB.")
@click.option("--root", metavar="NAME", help="Only what is below this name: state_dict.")
@click.option("--strip-prefix", metavar="TEXT", default="", help="Remove it from all names: module.")
@arguments.selecting
@click.option("--max-bytes", type=click.IntRange(0), help="The most bytes of tensors to unpack to.")
@click.option(
    "--verify/--no-verify", default=True, help="Compare every tensor after the write (the default)."
)
@arguments.writing
@printing
def command(
    screen: Screen,
    path: str,
    destination: str,
    source_format: SourceFormat | None,
    dtype: DtypeName | None,
    max_shard_size: str | None,
    root: str | None,
    strip_prefix: str,
    keys: Glob | None,
    drop: Glob | None,
    max_bytes: int | None,
    verify: bool,
    existing: Existing,
    dry_run: bool,
) -> int:
    """Convert SOURCE to DESTINATION, whose name says the format: .safetensors, .bt or .npz.

    SOURCE is a checkpoint of PyTorch, .npz, .npy, HDF5 or Keras, flax msgpack, ONNX, TensorFlow,
    PaddlePaddle, a pickle of arrays, GGUF, Arrow, Parquet, .safetensors or .bt. Its content decides, where it
    has a mark. No code from it is run.
    """
    if dry_run:
        return _planned(screen, path, destination, source_format, max_shard_size, existing)
    with bar(screen, "Converting") as tell:
        done = _convert.convert(
            path,
            destination,
            source_format=source_format,
            dtype=dtype,
            max_shard_size=max_shard_size,
            root=root,
            strip_prefix=strip_prefix,
            keys=keys,
            drop=drop,
            max_nbytes=max_bytes,
            verify=verify,
            **existing.options(),
            progress=tell,
        )
    screen.answer(_described(done))
    _tell(screen, done)
    return 0


def _planned(
    screen: Screen,
    path: str,
    destination: str,
    source_format: str | None,
    max_shard_size: str | None,
    existing: Existing,
) -> int:
    """Say what would be done, after all refusals that need no tensor."""
    if is_url(path):
        raise click.UsageError(
            f"{shown(path)}: is a URL: what it is can be said once it was fetched, so not by --dry-run"
        )
    _, word = resolved(path, source_format)
    to = Destination.of(destination, None, max_shard_size)
    to.check(existing)
    screen.answer({"dry_run": True, "source": path, "source_format": word, "destination": destination})
    screen.say(f"would write {shown(destination)}: {FORMATS[word].title} as {to.kind}")
    return 0


def _tell(screen: Screen, done: Conversion) -> None:
    compared = ", every tensor compared" if done.verified else ", not compared"
    cast = f", {len(done.cast):,} cast" if done.cast else ""
    what = f"{plural(done.tensors, 'tensor')}, {nbytes(done.nbytes)}{cast}{compared}"
    screen.say(f"wrote {shown(done.destination)}: {FORMATS[done.source_format].title}, {what}")
    if done.prefix:
        screen.say(
            f"all names begin with {shown(done.prefix)} (--strip-prefix {shown(done.prefix)} removes it)"
        )
    rows = [("shared", name, first) for name, first in done.shared.items()]
    rows += [("left out", one.name, f"{one.kind} {one.value}".rstrip()) for one in done.left_out]
    if rows and not screen.quiet:
        screen.table((Column("what"), Column("name"), Column("of")), rows)


def _described(done: Conversion) -> dict[str, object]:
    return {
        "dry_run": False,
        "source": done.source,
        "source_format": done.source_format,
        "destination": done.destination,
        "format": done.format,
        "files": done.files,
        "tensors": done.tensors,
        "nbytes": done.nbytes,
        "shared": done.shared,
        "cast": done.cast,
        "left_out": [{"name": one.name, "kind": one.kind, "value": one.value} for one in done.left_out],
        "dropped": done.dropped,
        "verified": done.verified,
        "prefix": done.prefix,
    }
