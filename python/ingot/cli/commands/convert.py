"""``ingot convert``: a file of another format as a file of tensors."""

from __future__ import annotations

from typing import Any

import click

from ingot import _convert
from ingot._convert.formats import FORMATS
from ingot._native import is_url
from ingot.cli import arguments
from ingot.cli.screen import Column, nbytes, plural, shown


@arguments.command(short_help="Convert a file of PyTorch, NumPy, GGUF, … to tensors.")
@arguments.source
@arguments.destination
@click.option(
    "--source-format",
    type=click.Choice(tuple(FORMATS)),
    help="The format of SOURCE. By default it is detected.",
)
@click.option("--dtype", type=arguments.FloatDtype(), help="Convert floating-point tensors to this dtype.")
@arguments.max_shard_size("Write several files and an index, each file with at most SIZE bytes of tensors.")
@click.option("--root", metavar="NAME", help="Convert only the tensors below NAME, such as state_dict.")
@click.option(
    "--strip-prefix",
    metavar="TEXT",
    default="",
    help="Remove TEXT, such as 'module.', from the start of every name.",
)
@arguments.selecting
@click.option(
    "--max-nbytes",
    type=click.IntRange(0),
    metavar="BYTES",
    help="Refuse a source that unpacks to more bytes.  [default: 100 times its size, at least 1 GiB]",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Read both files again and compare every tensor.",
)
@arguments.writing
def command(to: arguments.Output, /, path: str, destination: str, **options: Any) -> int:
    """Convert SOURCE to DESTINATION, a .safetensors, .bt or .npz file.

    SOURCE is a file of PyTorch, NumPy (.npz, .npy), HDF5 or Keras, flax (msgpack), ONNX, TensorFlow,
    PaddlePaddle, GGUF, Arrow, Parquet, a pickle of arrays, a .safetensors or .bt file, or a directory of
    torch.distributed.checkpoint. The format is detected from its contents. No code in SOURCE is run.
    """
    if not to.dry_run:
        with to.saving("Converting") as how:
            done = _convert.convert(path, destination, **options, **how)
    elif is_url(path):
        raise click.UsageError(f"{shown(path)}: --dry-run needs a local file: a URL has to be fetched first")
    else:
        done = _convert.planned(path, destination, **options, **to.existing.options())
    to.answer(done)
    _print(to, done)
    return 0


def _print(to: arguments.Output, done: _convert.Conversion) -> None:
    # With several files there is an index.
    files = "" if len(done.files) == 1 else f" in {len(done.files) - 1:,} files and an index"
    what = [f"{plural(done.tensors, 'tensor')}, {nbytes(done.nbytes)}"]
    what += [f"{len(done.cast):,} cast"] * bool(done.cast) + [_COMPARED[done.verified]]
    to.wrote(done.destination, f"{done.format}{files}, {', '.join(what)}")
    to.screen.say(f"from {shown(done.source)}: {FORMATS[done.source_format].title}")
    if done.prefix:
        prefix = shown(done.prefix)
        to.screen.say(f"all names begin with {prefix} (--strip-prefix {prefix} removes it)")
    rows = [("shared", name, first) for name, first in done.shared.items()]
    rows += [("left out", one.name, f"{one.kind} {one.value}".rstrip()) for one in done.left_out]
    if rows and not to.screen.quiet:
        to.screen.table((Column("what"), Column("name"), Column("of")), rows)


_COMPARED = {True: "every tensor compared", False: "not compared"}
