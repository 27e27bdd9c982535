"""``ingot cast``: the same tensors, floats in another dtype."""

from __future__ import annotations

import click

from ingot._base import checks
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import Source, chosen, opened, parameters
from ingot.cli.wording import nbytes, plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingot._base.checks import Existing
    from ingot._native import TensorInfo
    from ingot.typing import Glob


# Bytes of tensors that are in memory at once; one that is larger is alone.
_BATCH_NBYTES = 256 << 20
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@click.command(short_help="Write the tensors with floats in another dtype.")
@arguments.source
@arguments.destination
@click.option("--dtype", required=True, type=arguments.FloatDtype(), help="The new dtype.")
@arguments.selecting
@click.option(
    "--except",
    "same",
    multiple=True,
    metavar="PATTERN",
    help="Tensors that keep their dtype, such as '*norm*'.",
)
@arguments.writing
@printing
def command(
    screen: Screen,
    path: str,
    destination: str,
    dtype: str,
    keys: Glob | None,
    drop: Glob | None,
    same: tuple[str, ...],
    existing: Existing,
    dry_run: bool,
) -> int:
    """Write the tensors of SOURCE to DESTINATION with floats converted, as torch's .to(dtype) does it.

    Integers, booleans and complex numbers stay what they are. At most 256 MiB, or one tensor, are in memory.
    """
    source = opened(path)
    infos = chosen(path, source.infos(), keys, drop)
    floats = chosen(path, infos, None, arguments.patterns(same))
    changed = {info.name for info in floats if _changes(info, dtype)}
    arguments.target(destination, existing)
    after = sum(_size(info, dtype) if info.name in changed else info.nbytes for info in infos)
    if not dry_run:
        _write(screen, source, infos, changed, dtype, destination, existing)
    facts = {
        "file": destination,
        "dtype": dtype,
        "cast": len(changed),
        "tensors": len(infos),
        "nbytes": after,
    }
    screen.answer({"dry_run": dry_run, **facts})
    done = "would write" if dry_run else "wrote"
    cast = f"{plural(len(changed), 'tensor')} of {len(infos):,} cast to {dtype}"
    screen.say(f"{done} {shown(destination)}: {cast}, {nbytes(after)}")
    return 0


def _changes(info: TensorInfo, dtype: str) -> bool:
    return info.dtype in checks.FLOATS and info.dtype != dtype


def _size(info: TensorInfo, dtype: str) -> int:
    return parameters(info) * _BITS.get(dtype, 8) // 8


def _write(
    screen: Screen,
    source: Source,
    infos: Sequence[TensorInfo],
    changed: set[str],
    dtype: str,
    destination: str,
    existing: Existing,
) -> None:
    from ingot import numpy
    from ingot._read.select import Wanted
    from ingot._write.writer import Writer

    specs = {info.name: (dtype if info.name in changed else info.dtype, info.shape) for info in infos}
    metadata = source.metadata() or None
    made = Writer(destination, specs, metadata, **existing._asdict())
    with bar(screen, "Casting") as tell, made as writer:
        steps = Several(tell, sum(info.nbytes for info in infos))
        for checkpoint, names in source.checkpoints(info.name for info in infos):
            for batch in _batches([checkpoint.info(name) for name in names]):
                wanted = Wanted([info.name for info in batch], None, [specs[info.name][0] for info in batch])
                for info, array in zip(batch, checkpoint.parts(wanted, numpy.wrap), strict=True):
                    writer.write(info.name, array)
                    steps.step(info.nbytes)
        writer.commit()


def _batches(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    batch: list[TensorInfo] = []
    size = 0
    for info in infos:
        if batch and size + info.nbytes > _BATCH_NBYTES:
            yield batch
            batch, size = [], 0
        batch.append(info)
        size += info.nbytes
    if batch:
        yield batch
