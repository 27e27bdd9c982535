"""Arrow files and streams: columns of numbers and of tensors of one size."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy

from ingot._convert.limits import lacks, reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options
from ingot._convert.values import dtype_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.numpy import Array


# Columns of Arrow tables as tensors: a row of the table is a row of the tensor.


# Arrow's word to ours.
_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "halffloat": "F16",
    "float": "F32",
    "double": "F64",
}


def pyarrow(title: str) -> Any:
    """The package, imported now."""
    try:
        import pyarrow as found
    except ModuleNotFoundError as error:
        raise lacks("pyarrow", title, "convert") from error
    return found


def kind_of(pa: Any, arrow_type: Any) -> tuple[str, tuple[int, ...]] | None:
    """The code and the shape of one row; None for a column of another kind."""
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        # With a permutation, the logical order of the dimensions differs from the stored one.
        if arrow_type.permutation not in (None, list(range(len(arrow_type.shape)))):
            return None
        inner = kind_of(pa, arrow_type.value_type)
        return None if inner is None or inner[1] else (inner[0], tuple(arrow_type.shape))
    sizes: list[int] = []
    while pa.types.is_fixed_size_list(arrow_type):
        sizes.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    code = _CODES.get(str(arrow_type))
    return None if code is None else (code, tuple(sizes))


def values(pa: Any, path: str, name: str, chunk: Any, shape: tuple[int, ...]) -> Array:
    """The rows of one chunk."""
    rows = len(chunk)
    _refuse_nulls(path, name, chunk)
    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    while pa.types.is_fixed_size_list(chunk.type):
        # Unlike `values` it minds where the chunk begins.
        chunk = chunk.flatten()
        _refuse_nulls(path, name, chunk)
    array: Array = numpy.asarray(chunk.to_numpy(zero_copy_only=False))
    return array.reshape(rows, *shape)


def _refuse_nulls(path: str, name: str, chunk: Any) -> None:
    if chunk.null_count:
        raise refused(
            path,
            f"{chunk.null_count} values of the column are missing, and "
            "tensors have no such thing — drop=[…] leaves it out",
            code="missing-values",
            tensor=name,
            found=chunk.null_count,
        )


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
