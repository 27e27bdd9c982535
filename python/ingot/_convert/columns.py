"""Columns of Arrow tables as tensors: a row of the table is a row of the tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from .limits import lacks, refused

if TYPE_CHECKING:
    from ingot.numpy import Array

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
        # A permutation says that the dimensions stand in another order than they are stored in.
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
