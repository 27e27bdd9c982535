"""Parquet: columns of numbers and of tensors of one size, read one row group at a time."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.columns import kind_of, pyarrow, values
from ingot._convert.others import LeftOut
from ingot._convert.positions import cut_short
from ingot._convert.refusal import reading
from ingot._convert.source import Contents, Entry, Options
from ingot._convert.values import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.numpy import Array

TITLE = "a Parquet file"
MAGIC = b"PAR1"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The columns by name, each with the number of rows as its first dimension."""
    pa = pyarrow(TITLE)
    with reading(path, TITLE):
        file = import_module("pyarrow.parquet").ParquetFile(path)
    with file:
        with reading(path, TITLE):
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
