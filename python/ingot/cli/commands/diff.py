"""``ingot diff``: what is different in two files."""

from __future__ import annotations

import click

from ingot import _native
from ingot.cli import arguments
from ingot.cli.progress import Several, bar
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import Source, chosen, opened
from ingot.cli.tables import Column
from ingot.cli.wording import plural, real, shape

from .summary import abridged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._native import Distance, TensorInfo
    from ingot.typing import Glob

    # A sign, what it is about, the one and the other.
    Difference = tuple[str, str, str, str]

_COLUMNS = (Column(""), Column("name"), Column("A"), Column("B"))
_VALUES = (
    Column(""),
    Column("name"),
    *(Column(title, right=True) for title in ("different", "max abs", "rel L2", "cosine")),
)


@click.command(short_help="Compare two files: names, dtypes, shapes, metadata, values.")
@click.argument("a", metavar="A", callback=arguments.anywhere, shell_complete=arguments.paths)
@click.argument("b", metavar="B", callback=arguments.anywhere, shell_complete=arguments.paths)
@click.option("--values", is_flag=True, help="Also compare the values of tensors that both have.")
@arguments.selecting
@printing
def command(screen: Screen, a: str, b: str, values: bool, keys: Glob | None, drop: Glob | None) -> int:
    """Compare names, dtypes, shapes and metadata of two files; exits with 1 where they differ.

    - is only in A, + only in B, ~ differs, and * differs in values only. What --values gives: how many
    differ, the greatest absolute difference, the L2 norm of the difference relative to that of A, and the
    cosine of the angle between the two. A NaN equals every other, and the greatest difference of integers is
    exact. The files are read in parallel, in little memory, and tensors of equal bytes are only compared.
    """
    one, two = opened(a), opened(b)
    # A name or pattern may match tensors of one file only.
    both = {info.name: info for source in (one, two) for info in source.infos()}
    names = {info.name for info in chosen(f"{a} and {b}", [*both.values()], keys, drop)}
    tensors, metadata = list(_tensors(one, two, names)), list(_metadata(one, two))
    distances = _distances(screen, one, two, names) if values else {}
    if screen.as_json:
        screen.answer(_described(tensors, metadata, distances, values))
    if not screen.quiet:
        _print(screen, tensors, metadata, distances, values)
    return 1 if tensors or metadata or distances else 0


def _print(
    screen: Screen,
    tensors: list[Difference],
    metadata: list[Difference],
    distances: dict[str, Distance],
    values: bool,
) -> None:
    rows = tensors + [(sign, f"metadata: {key}", one, two) for sign, key, one, two in metadata]
    if rows:
        screen.table(_COLUMNS, rows)
    if distances:
        screen.table(_VALUES, [_row(name, found) for name, found in distances.items()])
    if screen.is_terminal:
        known = (
            f", {plural(len(distances), 'tensor')} with other values" if values else ", values not compared"
        )
        differing = (
            f"{plural(len(tensors), 'tensor')} and {plural(len(metadata), 'key')} of the metadata differ"
        )
        screen.say((differing if rows else "names, dtypes, shapes and metadata are equal") + known)


def _tensors(one: Source, two: Source, names: set[str]) -> Iterator[Difference]:
    ours, theirs = ({info.name: info for info in source.infos()} for source in (one, two))
    for name in _native.in_natural_order([*names]):
        info, other = ours.get(name), theirs.get(name)
        if info is None or other is None:
            yield "+" if info is None else "-", name, _told(info), _told(other)
        elif (info.dtype, info.shape) != (other.dtype, other.shape):
            yield "~", name, _told(info), _told(other)


def _told(info: TensorInfo | None) -> str:
    return "" if info is None else f"{info.dtype} {shape(info.shape)}"


def _metadata(one: Source, two: Source) -> Iterator[Difference]:
    ours, theirs = one.metadata(), two.metadata()
    for key in _native.in_natural_order([*ours.keys() | theirs.keys()]):
        text, other = ours.get(key), theirs.get(key)
        if text != other:
            sign = "~" if key in ours and key in theirs else "-" if key in ours else "+"
            yield sign, key, abridged(text or ""), abridged(other or "")


def _distances(screen: Screen, one: Source, two: Source, chosen: set[str]) -> dict[str, Distance]:
    """How far apart the values are, of tensors of one shape that differ at all."""
    theirs = {info.name: info for info in two.infos()}
    pairs = [
        info for info in one.in_natural_order() if info.name in chosen and _alike(info, theirs.get(info.name))
    ]
    names = [info.name for info in pairs]
    nbytes = sum(info.nbytes + theirs[info.name].nbytes for info in pairs)
    with bar(screen, "Comparing") as tell, Several(tell, nbytes).within(nbytes) as within:
        found = _native.distances(one.handle, two.handle, names, progress=within)
    return {name: apart for name, apart in zip(names, found, strict=True) if apart is not None}


def _alike(info: TensorInfo, other: TensorInfo | None) -> bool:
    return other is not None and info.shape == other.shape


def _row(name: str, found: Distance) -> tuple[str, ...]:
    return "*", name, *map(real, _numbers(found).values())


def _numbers(found: Distance) -> dict[str, float | None]:
    fields = ("different", "max_abs", "relative_l2", "cosine")
    return {field: getattr(found, field) for field in fields}


def _described(
    tensors: list[Difference], metadata: list[Difference], distances: dict[str, Distance], values: bool
) -> dict[str, object]:
    def named(rows: list[Difference], key: str) -> list[dict[str, str]]:
        kinds = {"-": "only-a", "+": "only-b", "~": "differs"}
        return [{"difference": kinds[sign], key: name, "a": one, "b": two} for sign, name, one, two in rows]

    answer: dict[str, object] = {
        "equal": not (tensors or metadata or distances),
        "tensors": named(tensors, "name"),
        "metadata": named(metadata, "key"),
    }
    if values:
        answer["values"] = [{"name": name, **_numbers(found)} for name, found in distances.items()]
    return answer
