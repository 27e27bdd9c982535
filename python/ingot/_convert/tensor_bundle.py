"""The variables of TensorFlow's checkpoints, which SavedModels keep theirs in as well."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from .others import LeftOut
from .refusal import lacks, reading
from .source import Contents, Entry, possible
from .values import code_of

if TYPE_CHECKING:
    from ingot.numpy import Array

TITLE = "a TensorFlow checkpoint"
# What TensorFlow 2 puts behind the path of each variable.
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def contents(prefix: str) -> Contents:
    """The variables of the checkpoint whose files begin with `prefix`, by their paths in the objects."""
    try:
        import tensorflow
    except ModuleNotFoundError as error:
        raise lacks("tensorflow", TITLE, "tensorflow") from error
    with reading(prefix, TITLE):
        reader = tensorflow.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for key in sorted(shapes):
        entry = possible(
            key.removesuffix(_SUFFIX), _entry, prefix, reader, key, tuple(shapes[key]), dtypes[key]
        )
        if entry is None:
            left_out.append(LeftOut(key.removesuffix(_SUFFIX), f"variable of {dtypes[key].name}"))
        else:
            entries.append(entry)
    return Contents(entries, left_out, {"format": "tf"})


def _entry(prefix: str, reader: Any, key: str, shape: tuple[int, ...], kind: Any) -> Entry | None:
    name = key.removesuffix(_SUFFIX)
    try:
        dtype = numpy.dtype(kind.as_numpy_dtype)
    except (TypeError, KeyError):
        # Resources and variants, which only programs have.
        return None
    code = code_of(prefix, name, dtype)
    return None if code is None else Entry(name, code, shape, partial(_values, prefix, reader, key, dtype))


def _values(prefix: str, reader: Any, key: str, dtype: Any) -> Array:
    with reading(prefix, TITLE):
        return numpy.asarray(reader.get_tensor(key), dtype)
