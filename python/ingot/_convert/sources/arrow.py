"""Arrow files and streams: columns of numbers and of tensors of one size."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.columns import kind_of, pyarrow, values
from ingot._convert.limits import reading
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options
from ingot._convert.values import dtype_of

if TYPE_CHECKING:
    from ingot.numpy import Array

TITLE = "an Arrow file"
MAGIC = b"ARROW1"
# Where a file has its stream, and the length of its footer.
_STREAM_AT, _LENGTH = 8, struct.Struct("<I")
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
            table = _rewound(source, open_it, pa, wanted).read_all()
            _expect_end(source, pa, is_file, _narrowest(schema))
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


def _rewound(source: Any, open_it: Any, pa: Any, fields: Iterable[int], begin: int = 0) -> Any:
    """Return a reader of some columns from the begin on."""
    source.seek(begin)
    return open_it(source, options=pa.ipc.IpcReadOptions(included_fields=list(fields)))


def _expect_end(source: Any, pa: Any, is_file: bool, fields: list[int]) -> None:
    """Raise if a stream is followed by more than what ends a file: the footer, its length and the mark."""
    end = source.size()
    if is_file:
        # A file is a stream behind a mark.
        source.seek(end - len(MAGIC) - _LENGTH.size)
        end -= len(MAGIC) + _LENGTH.size + _LENGTH.unpack(source.read(_LENGTH.size))[0]
    for _ in _rewound(source, pa.ipc.open_stream, pa, fields, _STREAM_AT if is_file else 0):
        pass
    if source.tell() != end:
        raise ValueError(f"{end - source.tell()} bytes follow its batches")


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
