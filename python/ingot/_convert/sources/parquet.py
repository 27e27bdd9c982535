"""Parquet: columns of numbers and of tensors of one size, read one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.limits import reading
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, cut_short, size_of
from ingot._convert.values import dtype_of

from .arrow import kind_of, pyarrow, values

if TYPE_CHECKING:
    from ingot.numpy import Array

TITLE = "a Parquet file"
MAGIC = b"PAR1"
# Bytes of the length of the footer, and of the longest gap between the columns and the footer.
_LENGTH_NBYTES, _LONGEST_GAP = 4, 64 << 20


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The columns by name, each with the number of rows as its first dimension."""
    pa = pyarrow(TITLE)
    with reading(path, TITLE):
        file = import_module("pyarrow.parquet").ParquetFile(path)
    with file:
        with reading(path, TITLE):
            _expect_one(path, file.metadata)
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            options.budget.unpack(sum(group.total_byte_size for group in groups))
            schema, rows = file.schema_arrow, file.metadata.num_rows
        entries, left_out = [], []
        for field in schema:
            kind = kind_of(pa, field.type)
            if kind is None:
                left_out.append(LeftOut(field.name, f"column of {field.type}", f"{rows} rows"))
                continue
            code, shape = kind
            read = partial(_column, pa, path, field.name, file, code, (rows, *shape))
            entries.append(Entry(field.name, code, (rows, *shape), read))
        yield Contents(entries, left_out)


def _expect_one(path: str, metadata: Any) -> None:
    """Raise if another file is in front of the footer, which counts positions from the begin of all."""
    ends = [len(MAGIC)]
    for number in range(metadata.num_row_groups):
        for column in map(metadata.row_group(number).column, range(metadata.num_columns)):
            begin = column.dictionary_page_offset or column.data_page_offset
            ends.append(begin + column.total_compressed_size)
    footer = size_of(path) - metadata.serialized_size - len(MAGIC) - _LENGTH_NBYTES
    with open(path, "rb") as file:
        file.seek(max(ends))
        # Indexes of pages and filters may be there; another file begins and ends with the mark.
        if MAGIC in file.read(min(max(footer - max(ends), 0), _LONGEST_GAP)):
            raise ValueError("it has more than one file")


def _column(pa: Any, path: str, name: str, file: Any, code: str, shape: tuple[int, ...]) -> Array:
    found = numpy.empty(shape, dtype_of(code))
    first = 0
    with reading(path, TITLE):
        for number in range(file.metadata.num_row_groups):
            column = file.read_row_group(number, columns=[name]).column(name)
            for chunk in column.chunks:
                part = values(pa, path, name, chunk, shape[1:])
                found[first : first + len(part)] = part
                first += len(part)
    if first != len(found):
        raise cut_short(path, name, len(found), first)
    return found
