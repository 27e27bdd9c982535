"""``ingot cat``: the values of a tensor."""

from __future__ import annotations

import click

from ingot.cli import arguments
from ingot.cli.screen import Screen, printing
from ingot.cli.slices import parsed
from ingot.cli.sources import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.cli.sources import Array


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
    """Values that Python has: floats of few bits as such of 32, complex numbers as pairs."""
    import numpy

    array = widened(array)
    if array.dtype.kind != "c":
        return array
    half = numpy.dtype(f"f{array.itemsize // 2}")
    return numpy.ascontiguousarray(array).reshape(array.shape).view(half).reshape(*array.shape, 2)


def widened(array: Array) -> Array:
    """The same values in a dtype of numpy's own: those of bfloat16 and smaller floats in float32, exactly."""
    # A dtype that was registered, and is no record.
    return array.astype("float32") if array.dtype.isbuiltin == 2 else array
