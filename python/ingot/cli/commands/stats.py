"""``ingot stats``: what the values of tensors are."""

from __future__ import annotations

import click

from ingot import _native
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import Source, chosen, opened
from ingot.cli.tables import Column
from ingot.cli.wording import real, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingot._native import Statistics
    from ingot.typing import Glob

    Found = dict[str, Statistics | None]

_COLUMNS = (
    Column("name"),
    Column("dtype"),
    *(Column(title, right=True) for title in ("min", "max")),
    *(Column(title, right=True, spare=True) for title in ("mean", "std")),
    *(Column(title, right=True) for title in ("zeros", "nan", "inf")),
)
_BAR = 40


@click.command(short_help="Range, mean, spread, zeros, NaN, infinities; a histogram.")
@arguments.path
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=arguments.tensor_names)
@arguments.selecting
@click.option("--all", "everything", is_flag=True, help="Every tensor of the file.")
@click.option(
    "--bins",
    type=click.IntRange(0, 1000),
    help="Parts of the histogram. 16 for one tensor on a terminal, else none.",
)
@printing
def command(
    screen: Screen,
    path: str,
    everything: bool,
    bins: int | None,
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Give the range, mean and spread of values, and how many are zero, NaN or infinite.

    Minimum, maximum, mean and standard deviation are those of the finite values. A complex number counts as
    two values. The file is read in parallel, in little memory.
    """
    if everything == bool(keys):
        raise click.UsageError("expected the name of a tensor, --keys or --all")
    source = opened(path)
    names = [info.name for info in chosen(path, source.in_natural_order(), keys, drop)]
    if bins is None:
        bins = 16 if len(names) == 1 and (screen.is_terminal or screen.as_json) else 0
    found = statistics(screen, source, names, bins)
    screen.answer({"tensors": [_described(source, name, found[name]) for name in names]})
    screen.table(_COLUMNS, [_row(source, name, found[name]) for name in names])
    for name in names if bins else ():
        screen.lines(_histogram(screen, name, found[name]))
    return 0


def statistics(screen: Screen, source: Source, names: Sequence[str] | None, bins: int = 0) -> Found:
    """The statistics of these tensors, or of all, by name."""
    total = sum(source.handle.info(name).nbytes for name in names or source.handle.offset_names())
    found: Found = {}
    with bar(screen, "Reading") as tell:
        steps = Several(tell, total)
        for checkpoint, held in source.checkpoints(names):
            with steps.within(sum(checkpoint.info(name).nbytes for name in held)) as within:
                of_file = _native.statistics(checkpoint, held, bins=bins, progress=within)
            found.update(zip(held, of_file, strict=True))
    return found


def _row(source: Source, name: str, found: Statistics | None) -> tuple[str, ...]:
    dtype = source.handle.info(name).dtype
    if found is None:
        return (name, dtype, *"-------")
    numbers = (found.min, found.max, found.mean, found.std)
    counts = (found.zeros, found.nans, found.infinities)
    return (name, dtype, *map(real, numbers), *map(str, counts))


def _described(source: Source, name: str, found: Statistics | None) -> dict[str, object]:
    facts: dict[str, object] = {"name": name, "dtype": source.handle.info(name).dtype}
    if found is None:
        return facts
    fields = ("count", "min", "max", "mean", "std", "zeros", "nans", "infinities", "malformed", "bins")
    return facts | {field: getattr(found, field) for field in fields}


def _histogram(screen: Screen, name: str, found: Statistics | None) -> Iterator[str]:
    """One line for each part of the range: where it begins, and how many values lie in it."""
    if found is None or found.min is None or found.max is None or screen.quiet or screen.as_json:
        return
    if screen.is_terminal:
        yield ""
        yield screen.strong(shown(name))
    bins, low, high = found.bins, float(found.min), float(found.max)
    most = max(bins) or 1
    for at, number in enumerate(bins):
        begin = low * (1 - at / len(bins)) + high * (at / len(bins))
        if screen.is_terminal:
            # No value at all is another thing than few.
            bar_length = max(round(_BAR * number / most), 1 if number else 0)
            yield f"{begin:>13.6g}  {'█' * bar_length}{' ' if bar_length else ''}{number:,}"
        else:
            yield f"{shown(name)}\tbin\t{begin!r}\t{number}"
