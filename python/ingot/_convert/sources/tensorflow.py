"""TensorFlow's checkpoints, files named ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``, and SavedModels.

Of SavedModels only the variables are read, which are in a checkpoint. The graph is left out, never run.
"""

from __future__ import annotations

import glob
import os
from functools import partial
from typing import Any

import numpy

from ingot._base.text import _escaped
from ingot._convert.limits import reading
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry
from ingot._convert.values import code_of

# TensorFlow 2 adds this to the path of each variable.
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "saved_model.pb"


def read(contents: Contents) -> None:
    """Add the variables of a prefix, of an index file, or of the only checkpoint in a folder."""
    path = contents.path
    if os.path.isdir(path):
        # The file `checkpoint` is ignored, since it may name any path.
        found = sorted(glob.glob(os.path.join(glob.escape(path), "*.index")))
        if len(found) != 1:
            names = ", ".join(_escaped(os.path.basename(name)) for name in found[:5])
            reason = (
                f"{len(found)} checkpoints in this folder: expected one — pass the path of one of {names}"
            )
            raise contents.refusal(reason, "ambiguous", expected=contents.title, found=len(found))
        path = found[0]
    _variables(contents, path.removesuffix(".index"))


def saved_model(contents: Contents) -> None:
    """Add the variables, by their paths in the objects."""
    folder = contents.path if os.path.isdir(contents.path) else os.path.dirname(contents.path)
    prefix = os.path.join(folder, "variables", "variables")
    if not os.path.isfile(prefix + ".index"):
        reason = f"a SavedModel without variables: there is no {_escaped(prefix)}.index"
        raise contents.refusal(reason, "no-tensors", expected=prefix + ".index")
    _variables(contents, prefix)
    contents.leave_out(GRAPH, "graph")


def _variables(contents: Contents, prefix: str) -> None:
    """Add the variables of the checkpoint with this file prefix, by their paths in the object graph."""
    tensorflow = contents.library("tensorflow")
    with reading(prefix, contents.title):
        reader = tensorflow.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    for key in sorted(shapes):
        contents.add(key.removesuffix(_SUFFIX), _entry, prefix, reader, key, tuple(shapes[key]), dtypes[key])
    contents.metadata["format"] = "tf"


def _entry(prefix: str, reader: Any, key: str, shape: tuple[int, ...], kind: Any) -> Entry | LeftOut:
    name = key.removesuffix(_SUFFIX)
    try:
        dtype = numpy.dtype(kind.as_numpy_dtype)
    except (TypeError, KeyError):
        # Resources and variants, which only programs have.
        dtype = numpy.dtype("V")
    code = code_of(prefix, name, dtype)
    if code is None:
        return LeftOut(name, f"variable of {kind.name}")
    return Entry(name, code, shape, partial(_values, reader, key, dtype))


def _values(reader: Any, key: str, dtype: Any) -> Any:
    return numpy.asarray(reader.get_tensor(key), dtype)
