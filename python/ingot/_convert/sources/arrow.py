"""Arrow files and streams: columns of numbers and of tensors of one size."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.columns import kind_of, pyarrow, values
from ingot._convert.others import LeftOut
from ingot._convert.refusal import reading
from ingot._convert.source import Contents, Entry, Options
from ingot._convert.values import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.numpy import Array

TITLE = "an Arrow file"
MAGIC = b"ARROW1"
# More bits than a value of any column with a width has.
_WIDEST = 1 << 40


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The columns by name, each with the number of rows as its first dimension."""
    pa = pyarrow(TITLE)
    with reading(path, TITLE), open(path, "rb") as file:
        is_file = file.read(len(MAGIC)) == MAGIC
    with pa.memory_map(path) as source:
        with reading(path, TITLE):
            open_it = pa.ipc.open_file if is_file else pa.ipc.open_stream
            schema = open_it(source).schema
            wanted = range(len(schema)) if options.values else _narrowest(schema)
            source.seek(0)
            table = open_it(source, options=pa.ipc.IpcReadOptions(included_fields=list(wanted))).read_all()
            # Offsets and lengths come from the file, and are not looked at before.
            table.validate(full=True)
        rows = table.num_rows
        entries, left_out = [], []
        for number, field in enumerate(schema):
            kind = kind_of(pa, field.type)
            if kind is None:
                left_out.append(LeftOut(field.name, f"column of {field.type}", f"{rows} rows"))
                continue
            code, shape = kind
            read = partial(_column, pa, path, field.name, table, number, code, shape)
            entries.append(Entry(field.name, code, (rows, *shape), read))
        yield Contents(entries, left_out)


def _narrowest(schema: Any) -> list[int]:
    """The column that is the soonest read: only the batches say how many rows there are."""

    def nbits(number: int) -> int:
        try:
            width: int = schema.types[number].bit_width
        except ValueError:
            # Of text and of lists.
            width = _WIDEST
        return width

    return [min(range(len(schema)), key=nbits)] if len(schema) else []


def _column(
    pa: Any, path: str, name: str, table: Any, number: int, code: str, shape: tuple[int, ...]
) -> Array:
    column = table.column(number)
    found = numpy.empty((len(column), *shape), dtype_of(code))
    first = 0
    with reading(path, TITLE):
        for chunk in column.chunks:
            found[first : first + len(chunk)] = values(pa, path, name, chunk, shape)
            first += len(chunk)
    return found
