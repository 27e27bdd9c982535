"""``ingot stats``: statistics of the values of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ingot._base.keys import is_pattern
from ingot._read.stats import Stats, TensorStats, stats
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, printing, real, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.typing import Glob

_COLUMNS = (
    Column("name"),
    Column("dtype", spare=True),
    *(Column(title, right=True, spare=True) for title in ("min", "max", "mean", "std")),
    *(Column(title, right=True) for title in ("zeros", "nan", "inf")),
)
_BAR = 40


@arguments.command(short_help="Print range, mean, deviation, zeros, NaN, infinities, histogram.")
@arguments.path
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=arguments.tensor_names)
@arguments.selecting
@click.option("--all", "everything", is_flag=True, help="Select all tensors.")
@click.option(
    "--bins",
    type=click.IntRange(0, 1000),
    metavar="N",
    help="Print a histogram with N bins.  [default: 16 for one NAME on a terminal, else 0]",
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
    """Print statistics of tensors: minimum, maximum, mean, standard deviation, zeros, NaN and infinities.

    The first four are computed from the finite values. A complex number counts as two values. The command
    reads in parallel and needs little memory.
    """
    if everything == bool(keys):
        raise click.UsageError("expected the NAME of a tensor, --keys, or --all")
    if bins is None:
        is_one = keys is not None and len(keys.patterns) == 1 and not is_pattern(keys.patterns[0])
        bins = 16 if is_one and (screen.is_terminal or screen.as_json) else 0
    with bar(screen, "Reading") as tell:
        found = stats(path, keys=keys, drop=drop, bins=bins, progress=tell)
    screen.reports([found])
    screen.table(_COLUMNS, _rows(found))
    for name, tensor in found.tensors.items() if bins else ():
        screen.lines(_histogram(screen, name, tensor))
    return 0


def _rows(found: Stats) -> Iterator[tuple[str, ...]]:
    for name, one in found.tensors.items():
        numbers, counts = (one.min, one.max, one.mean, one.std), (one.zeros, one.nans, one.infinities)
        yield (name, one.dtype, *map(real, numbers), *map(str, counts))
    for name, dtype in found.unread.items():
        yield (name, dtype, *"-------")


def _histogram(screen: Screen, name: str, found: TensorStats) -> Iterator[str]:
    """Yield a line for each bin: its begin, and the number of values in it."""
    if found.min is None or found.max is None or screen.quiet or screen.as_json:
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
