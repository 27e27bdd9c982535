"""Arrow files and streams, and Parquet: columns of numbers and of tensors of one size.

A row of the table is a row of the tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._base.dtypes import CODES
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, size_of
from ingot._convert.values import dtype_of

if TYPE_CHECKING:
    from ingot.numpy import Array

# Arrow's name of a dtype to the code.
_CODES = {"halffloat": "F16", "float": "F32", "double": "F64"} | {
    word: CODES[word]
    for word in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
MAGIC = b"ARROW1"
# The position of the stream in a file, and the length of its footer.
_STREAM_AT, _LENGTH = 8, struct.Struct("<I")
# More bits than a value of any column of a fixed width has.
_WIDEST = 1 << 40
PARQUET = b"PAR1"
# Bytes of the length of the footer, and of the longest gap between the columns and the footer.
_LENGTH_NBYTES, _LONGEST_GAP = 4, 64 << 20


def read(contents: Contents) -> None:
    """Add the columns by name, each with the number of rows as its first dimension."""
    pa = contents.library("pyarrow")
    with contents.reading(), open(contents.path, "rb") as file:
        is_file = file.read(len(MAGIC)) == MAGIC
    source = contents.enter_context(pa.memory_map(contents.path))
    with contents.reading():
        open_it = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = open_it(source).schema
        wanted = range(len(schema)) if contents.options.values else _narrowest(schema)
        table = _rewound(source, open_it, pa, wanted).read_all()
        _expect_end(source, pa, is_file, _narrowest(schema))
        # Offsets and lengths come from the file, and are only checked here.
        table.validate(full=True)
    _add_columns(contents, pa, schema, table.num_rows, lambda number: table.column(number).chunks)


def parquet(contents: Contents) -> None:
    """Add the columns by name. One row group at a time is in memory."""
    pa = contents.library("pyarrow")
    with contents.reading():
        file = contents.enter_context(contents.library("pyarrow.parquet").ParquetFile(contents.path))
        metadata = file.metadata
        _expect_one(contents.path, metadata)
        groups = range(metadata.num_row_groups)
        contents.budget.unpack(sum(metadata.row_group(group).total_byte_size for group in groups))
        schema = file.schema_arrow

    def chunks(number: int) -> Iterable[Any]:
        name = schema.field(number).name
        for group in groups:
            yield from file.read_row_group(group, columns=[name]).column(name).chunks

    _add_columns(contents, pa, schema, metadata.num_rows, chunks)


def _add_columns(
    contents: Contents, pa: Any, schema: Any, rows: int, chunks: Callable[[int], Iterable[Any]]
) -> None:
    for number, field in enumerate(schema):
        contents.add(field.name, _column, contents, pa, field, rows, partial(chunks, number))


def _column(
    contents: Contents, pa: Any, field: Any, rows: int, chunks: Callable[[], Iterable[Any]]
) -> Entry | LeftOut:
    name, kind = field.name, _kind_of(pa, field.type)
    if kind is None:
        return LeftOut(name, f"column of {field.type}", f"{rows} rows")
    code, shape = kind

    def values() -> Array:
        found = numpy.empty((rows, *shape), dtype_of(code))
        first = 0
        for chunk in chunks():
            found[first : first + len(chunk)] = _rows(contents, pa, name, chunk, shape)
            first += len(chunk)
        if first != rows:
            raise ValueError(f"expected {rows} rows, found {first}")
        return found

    return Entry(name, code, (rows, *shape), values)


def _kind_of(pa: Any, arrow_type: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the code and the shape of one row, or None for a column of another kind."""
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        # With a permutation, the logical order of the dimensions differs from the stored one.
        if arrow_type.permutation not in (None, list(range(len(arrow_type.shape)))):
            return None
        inner = _kind_of(pa, arrow_type.value_type)
        return None if inner is None or inner[1] else (inner[0], tuple(arrow_type.shape))
    sizes: list[int] = []
    while pa.types.is_fixed_size_list(arrow_type):
        sizes.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    code = _CODES.get(str(arrow_type))
    return None if code is None else (code, tuple(sizes))


def _rows(contents: Contents, pa: Any, name: str, chunk: Any, shape: tuple[int, ...]) -> Array:
    """Return the rows of one chunk."""
    rows = len(chunk)
    _refuse_nulls(contents, name, chunk)
    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    while pa.types.is_fixed_size_list(chunk.type):
        # Unlike `values`, it respects the begin of the chunk.
        chunk = chunk.flatten()
        _refuse_nulls(contents, name, chunk)
    array: Array = numpy.asarray(chunk.to_numpy(zero_copy_only=False))
    return array.reshape(rows, *shape)


def _refuse_nulls(contents: Contents, name: str, chunk: Any) -> None:
    count = chunk.null_count
    if count:
        reason = f"{count} values of the column are missing — drop=[…] leaves it out"
        raise contents.refusal(reason, "missing-values", name, found=count)


def _rewound(source: Any, open_it: Any, pa: Any, fields: Iterable[int], begin: int = 0) -> Any:
    """Return a reader of some columns from the begin on."""
    source.seek(begin)
    return open_it(source, options=pa.ipc.IpcReadOptions(included_fields=list(fields)))


def _expect_end(source: Any, pa: Any, is_file: bool, fields: list[int]) -> None:
    """Raise if bytes follow a stream, except the end of a file: the footer, its length and the mark."""
    end = source.size()
    if is_file:
        # A file is a stream after a mark.
        source.seek(end - len(MAGIC) - _LENGTH.size)
        end -= len(MAGIC) + _LENGTH.size + _LENGTH.unpack(source.read(_LENGTH.size))[0]
    for _ in _rewound(source, pa.ipc.open_stream, pa, fields, _STREAM_AT if is_file else 0):
        pass
    if source.tell() != end:
        raise ValueError(f"{end - source.tell()} bytes follow its batches")


def _narrowest(schema: Any) -> list[int]:
    """Return the column that is read fastest: the number of rows is only in the batches."""

    def nbits(number: int) -> int:
        try:
            width: int = schema.types[number].bit_width
        except ValueError:
            # Text and lists have no fixed width.
            width = _WIDEST
        return width

    return [min(range(len(schema)), key=nbits)] if len(schema) else []


def _expect_one(path: str, metadata: Any) -> None:
    """Raise if another file precedes the footer, which counts positions from the begin of all bytes."""
    ends = [len(PARQUET)]
    for number in range(metadata.num_row_groups):
        for column in map(metadata.row_group(number).column, range(metadata.num_columns)):
            begin = column.dictionary_page_offset or column.data_page_offset
            ends.append(begin + column.total_compressed_size)
    footer = size_of(path) - metadata.serialized_size - len(PARQUET) - _LENGTH_NBYTES
    with open(path, "rb") as file:
        file.seek(max(ends))
        # Indexes of pages and filters may be there; another file begins and ends with the mark.
        if PARQUET in file.read(min(max(footer - max(ends), 0), _LONGEST_GAP)):
            raise ValueError("it has more than one file")
