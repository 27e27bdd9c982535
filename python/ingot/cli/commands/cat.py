"""``ingot cat``: the values of a tensor."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

import click

from ingot.cli import arguments
from ingot.cli.screen import Screen, printing, shown
from ingot.cli.sources import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import EllipsisType

    from ingot.cli.sources import Array

    Index = int | slice | EllipsisType

# ``NAME[0:2,:5]``: a tensor and a part of it, as people type them.


_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def parsed(text: str, names: Container[str]) -> tuple[str, tuple[Index, ...]]:
    """Return the name and the index, which is empty for the whole tensor.

    If `names` has the whole text, brackets included, it is the name.
    """
    if text in names or not text.endswith("]") or "[" not in text:
        return text, ()
    name, _, inside = text[:-1].rpartition("[")
    parts = inside.split(",") if inside.strip() else []
    return name, tuple(_part(part.strip(), text) for part in parts)


def _part(part: str, text: str) -> Index:
    if part == "...":
        return ...
    bounds = [_bound(bound.strip(), part, text) for bound in part.split(":")]
    if len(bounds) == 1 and bounds[0] is not None:
        return bounds[0]
    if 2 <= len(bounds) <= 3:
        return slice(*bounds)
    raise _refused(part, text)


def _bound(bound: str, part: str, text: str) -> int | None:
    if not bound:
        return None
    if not _NUMBER.fullmatch(bound):
        raise _refused(part, text)
    return int(bound)


def _refused(part: str, text: str) -> click.UsageError:
    return click.UsageError(
        f"`{shown(text)}`: expected a number, first:last, first:last:step or ... between the commas, "
        f"found `{shown(part)}`"
    )


@arguments.command(short_help="Print the values of a tensor or of a slice.")
@arguments.path
@click.argument("part", metavar="NAME[SLICE]", shell_complete=arguments.tensor_names)
@printing
def command(screen: Screen, path: str, part: str) -> int:
    """Print the values of a tensor, or of a slice such as 'wte[0:2, :5]'. Only the slice is read.

    On a terminal, numpy formats the values and abridges long arrays. In a pipe, each row is one line with all
    values, separated by tabs.
    """
    source = opened(path)
    name, index = parsed(part, source.handle)
    array = source.selected(name, index) if index else source.values(name)
    if screen.as_json:
        dtype = source.handle.info(name).dtype
        screen.answer({"name": name, "dtype": dtype, "shape": array.shape, "values": _plain(array).tolist()})
    elif screen.is_terminal:
        from numpy import array2string

        screen.lines(array2string(_plain(array), max_line_width=screen.width).split("\n"))
    else:
        screen.lines(_lines(array))
    return 0


def _lines(array: Array) -> Iterator[str]:
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    for row in rows:
        yield "\t".join(map(str, _plain(row).tolist()))


def _plain(array: Array) -> Array:
    """Return values for printing: small floats as float32, complex numbers as pairs."""
    import numpy

    array = widened(array)
    if array.dtype.kind != "c":
        return array
    half = numpy.dtype(f"f{array.itemsize // 2}")
    return numpy.ascontiguousarray(array).reshape(array.shape).view(half).reshape(*array.shape, 2)


def widened(array: Array) -> Array:
    """Return the same values in a dtype of NumPy itself: float32 for bfloat16 and smaller floats."""
    # The dtypes of ml_dtypes are registered with NumPy.
    return array.astype("float32") if array.dtype.isbuiltin == 2 else array
