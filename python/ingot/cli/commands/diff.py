"""``ingot diff``: the differences of two files."""

from __future__ import annotations

import click

from ingot._read.diff import Diff, diff
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, plural, printing, real, shape, warn

from .summary import abridged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import TensorInfo
    from ingot.typing import Glob

_COLUMNS = (Column(""), Column("name"), Column("A"), Column("B"))
_VALUES = (
    Column(""),
    Column("name"),
    *(Column(title, right=True) for title in ("different", "max abs")),
    *(Column(title, right=True, spare=True) for title in ("rel L2", "cosine")),
)


@arguments.command(short_help="Compare names, dtypes, shapes, metadata and values of two files.")
@arguments.place("a", "A")
@arguments.place("b", "B")
@click.option("--values", is_flag=True, help="Also compare values.")
@arguments.selecting
@printing
def command(screen: Screen, a: str, b: str, values: bool, keys: Glob | None, drop: Glob | None) -> int:
    """Compare names, dtypes, shapes and metadata of two files. The exit status is 1 if they differ.

    A line begins with - for a tensor in A only, + for one in B only, ~ for another dtype or shape, and * for
    other values. --values prints the number of different values, the greatest absolute difference, the L2
    norm of the difference relative to the norm of A, and the cosine of the angle between the two. All NaN are
    equal. The command reads in parallel and needs little memory.
    """
    with bar(screen, "Comparing") as tell:
        found = diff(a, b, values=values, keys=keys, drop=drop, progress=tell)
    screen.reports([found])
    if not screen.quiet:
        _print(screen, found)
    return 0 if found.equal else 1


def _print(screen: Screen, found: Diff) -> None:
    rows = [(_sign(*pair), name, *map(_described, pair)) for name, pair in found.tensors.items()]
    rows += [
        (_sign(*pair), f"metadata: {key}", *(abridged(text or "") for text in pair))
        for key, pair in found.metadata.items()
    ]
    if rows:
        screen.table(_COLUMNS, rows)
    if found.values:
        screen.table(_VALUES, [("*", name, *map(real, apart)) for name, apart in found.values.items()])
    if screen.is_terminal:
        known = (
            ", values not compared"
            if found.values is None
            else f", {plural(len(found.values), 'tensor')} with other values"
        )
        differing = (
            f"{plural(len(found.tensors), 'tensor')} and "
            f"{plural(len(found.metadata), 'key')} of the metadata differ"
        )
        screen.say((differing if rows else "names, dtypes, shapes and metadata are equal") + known)
    elif found.equal and found.values is None and not screen.as_json:
        # No output in a pipe could be taken for equal values.
        warn("names, dtypes, shapes and metadata are equal; --values compares the values too")


def _sign(one: object, two: object) -> str:
    return "-" if two is None else "+" if one is None else "~"


def _described(info: TensorInfo | None) -> str:
    return "" if info is None else f"{info.dtype} {shape(info.shape)}"
