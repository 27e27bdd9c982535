"""TensorFlow's checkpoints: files named ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy

from ingot._base.text import _escaped
from ingot._convert.limits import lacks, reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, possible
from ingot._convert.values import code_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.numpy import Array


# The variables of TensorFlow's checkpoints, which SavedModels keep theirs in as well.


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


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The variables of a prefix, of an index file, or of the only checkpoint in a folder."""
    yield contents(_prefix(path))


def _prefix(path: str) -> str:
    if not os.path.isdir(path):
        return path.removesuffix(".index")
    # Not from the file `checkpoint`, which may name any path at all.
    found = sorted(glob.glob(os.path.join(glob.escape(path), "*.index")))
    if len(found) != 1:
        names = ", ".join(_escaped(os.path.basename(name)) for name in found[:5])
        raise refused(
            path,
            f"{len(found)} checkpoints are in this folder: expected one — give the path of one of {names}",
            code="ambiguous",
            expected=TITLE,
            found=len(found),
        )
    return found[0].removesuffix(".index")
