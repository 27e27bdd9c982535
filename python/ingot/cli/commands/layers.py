"""``ingot layers``: the table of parameters that safemetadata prints."""

from __future__ import annotations

from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, count, printing, shape
from ingot.cli.sources import opened
from ingot.cli.table import boxed

_COLUMNS = (Column("Parameter Name"), Column("DType"), Column("Shape"))


@arguments.command(short_help="Print a table of all parameters, and their total.")
@arguments.path
@printing
def command(screen: Screen, path: str) -> int:
    """Print a table of all parameters with dtype and shape, and their total."""
    infos = opened(path).in_natural_order()
    total = sum(info.parameter_count for info in infos)
    rows = [(info.name, info.dtype, shape(info.shape)) for info in infos]
    if screen.as_json:
        layers = [{"name": info.name, "dtype": info.dtype, "shape": info.shape} for info in infos]
        screen.answer({"layers": layers, "parameters": total})
    elif screen.is_terminal and not screen.quiet:
        screen.lines(boxed(_COLUMNS, rows, screen.width, screen.strong))
        screen.say(f"Total parameters: {count(total)}")
    else:
        screen.table(_COLUMNS, rows)
    return 0
