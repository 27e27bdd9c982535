"""Arrow files and streams: columns of numbers and of tensors of one size."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.columns import kind_of, pyarrow, values
from ingot._convert.refusal import reading
from ingot._convert.source import Contents, Entry, LeftOut, Options
from ingot._convert.values import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.numpy import Array

TITLE = "an Arrow file"
MAGIC = b"ARROW1"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The columns by name, each with the number of rows as its first dimension."""
    pa = pyarrow(TITLE)
    with reading(path, TITLE), open(path, "rb") as file:
        is_file = file.read(len(MAGIC)) == MAGIC
    with pa.memory_map(path) as source:
        with reading(path, TITLE):
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            table = reader.read_all()
            # Offsets and lengths come from the file, and are not looked at before.
            table.validate(full=True)
        entries, left_out = [], []
        for field, column in zip(table.schema, table.columns, strict=True):
            kind = kind_of(pa, field.type)
            if kind is None:
                left_out.append(LeftOut(field.name, f"column of {field.type}", f"{table.num_rows} rows"))
                continue
            code, shape = kind
            read = partial(_column, pa, path, field.name, column, code, shape)
            entries.append(Entry(field.name, code, (table.num_rows, *shape), read))
        yield Contents(entries, left_out)


def _column(pa: Any, path: str, name: str, column: Any, code: str, shape: tuple[int, ...]) -> Array:
    found = numpy.empty((len(column), *shape), dtype_of(code))
    first = 0
    with reading(path, TITLE):
        for chunk in column.chunks:
            found[first : first + len(chunk)] = values(pa, path, name, chunk, shape)
            first += len(chunk)
    return found
