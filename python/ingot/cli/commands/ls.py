"""``ingot ls``: the tensors, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import click

from ingot.cli import arguments
from ingot.cli.screen import Column, OfEach, Screen, csv, plural, printing, shape
from ingot.cli.sources import chosen, models_of, open_model
from ingot.errors import TensorNotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.cli.sources import Opened, Row
    from ingot.typing import Glob

_SHORT = (Column("name"), Column("dtype"), Column("shape"))
_LONG = (*_SHORT, Column("parameters", right=True), Column("size", right=True))
_PLACES = (Column("begin", right=True, spare=True), Column("end", right=True, spare=True), Column("file"))


@arguments.command()
@arguments.several
@click.option("-l", "--long", is_flag=True, help="Also print parameters, bytes, position and file.")
@click.option(
    "--sort",
    type=click.Choice(["name", "size", "file"]),
    default="name",
    show_default=True,
    help="Sort by name (layer.2 before layer.10), by size (largest first), or as in the file.",
)
@click.option("-r", "--reverse", is_flag=True, help="Reverse the order.")
@arguments.selecting
@csv
@printing
def command(
    screen: Screen,
    paths: tuple[str, ...],
    long: bool,
    sort: str,
    reverse: bool,
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """List the tensors with their dtypes and shapes.

    Also lists the tensors of files that `ingot convert` reads. Only headers are read.
    With several models, the first column is the model, and a name that no model has is an error.
    """
    models = models_of(paths)
    if len(models) > 1:
        return _of_models(screen, models, long, lambda source: _listed(source, sort, reverse, keys, drop))
    source = open_model(models[0])
    infos = _listed(source, sort, reverse, keys, drop)
    if screen.as_json:
        screen.answer({"tensors": [described(source, info) for info in infos]})
    elif long:
        # On a terminal the column of files is only shown if there are several.
        places = _PLACES[:-1] if screen.is_terminal and len(source.files) == 1 else _PLACES
        columns = (*_LONG, *places)
        screen.table(columns, (row[: len(columns)] for row in _long_rows(screen, source, infos)))
    else:
        screen.table(_SHORT, _rows(infos))
    return 0


def _of_models(
    screen: Screen, models: Sequence[str], long: bool, listed: Callable[[Opened], Sequence[Row]]
) -> int:
    """Print the tensors of several models as one table."""
    missing: list[str] = []

    def rows_of(model: str) -> tuple[Opened, Sequence[Row]]:
        source = open_model(model)
        try:
            return source, listed(source)
        except TensorNotFoundError:
            missing.append(model)
            return source, ()

    results = OfEach(screen, models, rows_of)
    found = [both for _, both in results.found]
    if missing and len(missing) == len(found):
        raise click.UsageError(f"{plural(len(missing), 'model')}: no tensor has a name of --keys and --drop")
    if screen.as_json:
        every = [
            {"path": one.path, "tensors": [described(one, info) for info in infos]} for one, infos in found
        ]
        screen.answer({"models": results.in_order(every)})
        return results.status
    columns = (*_LONG, *_PLACES) if long else _SHORT
    rows = (
        (source.path, *row)
        for source, infos in found
        for row in (_long_rows(screen, source, infos) if long else _rows(infos))
    )
    screen.table((Column("model"), *columns), rows)
    return results.status


def _listed(source: Opened, sort: str, reverse: bool, keys: Glob | None, drop: Glob | None) -> Sequence[Row]:
    infos = chosen(source, _sorted(source, sort), keys, drop)
    return infos[::-1] if reverse else infos


def _sorted(source: Opened, sort: str) -> Sequence[Row]:
    if sort == "file":
        return source.infos()
    infos: Sequence[Row] = source.in_natural_order()
    return sorted(infos, key=lambda info: -(info.nbytes or 0)) if sort == "size" else infos


def described(source: Opened, info: Row) -> dict[str, object]:
    """Return the facts of a tensor for ``--json``."""
    return {
        "name": info.name,
        "dtype": info.dtype,
        "shape": info.shape,
        "begin": info.begin,
        "end": info.end,
        "nbytes": info.nbytes,
        "parameters": info.parameter_count,
        "file": source.file_name_of(info.name),
    }


class _Shapes(dict["tuple[int, ...] | None", str]):
    """Shapes as text. Few differ, and making it takes longest."""

    def __missing__(self, dims: tuple[int, ...] | None) -> str:
        text = self[dims] = "?" if dims is None else shape(dims)
        return text


def _rows(infos: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    # This avoids Python code for each of 500,000 tensors.
    shapes = map(_Shapes().__getitem__, map(attrgetter("shape"), infos))
    return zip(map(attrgetter("name"), infos), map(attrgetter("dtype"), infos), shapes, strict=True)


def _long_rows(screen: Screen, source: Opened, infos: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for info, short in zip(infos, _rows(infos), strict=True):
        counts = (_known(str, info.parameter_count), _known(screen.size, info.nbytes))
        yield *short, *counts, _known(str, info.begin), _known(str, info.end), source.file_name_of(info.name)


def _known(text: Callable[[int], str], number: int | None) -> str:
    return "-" if number is None else text(number)
