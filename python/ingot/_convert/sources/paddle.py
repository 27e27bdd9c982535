"""PaddlePaddle's .pdparams and other pickles of NumPy's arrays. No name in a pickle is called.

Paddle keeps bfloat16 in NumPy's uint16. It marks its tensors: in a table of names beside them, or by how they
are pickled. Other arrays of uint16 are uint16; the caller has to confirm it for a file called ``.pdparams``.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert import pickles
from ingot._convert.flatten import flatten
from ingot._convert.pickles import Machine, PickledArray, is_array
from ingot._convert.report import Unusable
from ingot._convert.source import Contents, Entry, Stream
from ingot._convert.values import dtype_of, elements

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

SUFFIXES = (".pdparams", ".pdopt")
# `paddle.save` adds to a dict of tensors the names of its parameters,
_NAME_TABLE = "StructuredToParameterName@@"
# and how tensors of more than 4 GiB were cut, with the names of the parts.
_CUT = "UnpackBigParamInfor@@"


def read(contents: Contents) -> None:
    """Add the arrays of nested dicts, named as `ingot._convert.flatten` documents."""
    path, source_format = contents.path, contents.options.source_format
    with contents.reading(), open(path, "rb") as file:
        machine = _Machine(Stream(path, file), contents.budget)
        tree = machine.load()
        machine.expect_end()
        if isinstance(tree, dict):
            _join(tree)
            machine.marked |= _named_in_table(tree)
    is_paddle = source_format == "paddle" or path.lower().endswith(SUFFIXES)

    def entry(name: str, array: PickledArray) -> Entry:
        is_marked = id(array) in machine.marked or source_format == "paddle"
        if array.fault is not None or array.dtype != numpy.uint16:
            return pickles.entry(path, name, array)
        if is_paddle and not is_marked and source_format is None:
            reason = "uint16 without Paddle's mark, which may be bfloat16 or integers"
            way_out = "source_format='paddle' makes BF16 of it, and source_format='pickle' U16"
            raise contents.refusal(f"{reason}: {way_out}", "unclear-dtype", name, found="uint16")
        return pickles.entry(path, name, array, dtype_of("BF16") if is_marked else None)

    flatten(contents, tree, is_array, entry)
    contents.metadata |= {"format": "paddle"} if is_paddle or machine.marked else {}


class _Joined(PickledArray):
    """Join an array that older pickle protocols had to split."""

    def __init__(self, parts: list[PickledArray], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._parts = parts
        self.dtype, self.shape = parts[0].dtype, shape
        self.fault = next((part.fault for part in parts if part.fault is not None), None)
        if elements(shape) != sum(elements(part.shape) for part in parts):
            self.fault = Unusable(f"its parts do not make up its shape {list(shape)}", "size-mismatch")

    def read(self, name: str, dtype: numpy.dtype[Any]) -> Array:
        parts = [part.read(name, dtype).reshape(-1) for part in self._parts]
        return numpy.concatenate(parts).reshape(self.shape)


class _Machine(Machine):
    def __init__(self, source: Stream, budget: Budget) -> None:
        super().__init__(source, budget)
        self.marked: set[int] = set()
        """The ids of the arrays that are marked as Paddle's tensors."""
        self.calls |= {"builtins.tuple": self._named, "builtins.eval": self._data}

    def _data(self, expression: object = None, names: object = None) -> object:
        """Return the array of ``eval("data", {"data": array})``, a form in which Paddle pickles tensors."""
        array = names.get("data") if isinstance(names, dict) and names.keys() == {"data"} else None
        if expression != "data" or not isinstance(array, PickledArray):
            raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
        self.marked.add(id(array))
        return array

    def _named(self, items: object = ()) -> object:
        """Return the array of ``tuple((name, array))``, the other form."""
        if isinstance(items, tuple) and [type(item) for item in items] == [str, PickledArray]:
            self.marked.add(id(items[1]))
            return items[1]
        return tuple(items) if isinstance(items, (tuple, list)) else ()


def _named_in_table(tree: dict[Any, Any]) -> set[int]:
    """Remove the table of names of Paddle's tensors, and return the ids of these tensors."""
    table = tree.get(_NAME_TABLE)
    # A tensor of that name is a tensor.
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        return set()
    del tree[_NAME_TABLE]
    return {id(tree[key]) for key in table if key in tree}


def _join(tree: dict[Any, Any]) -> None:
    """Join the parts of tensors that were split."""
    cut = tree.get(_CUT)
    if not isinstance(cut, dict):
        return
    del tree[_CUT]
    for name, how in cut.items():
        parts = [tree.pop(part) for part in how["slices"]]
        if name in tree or not parts or not all(isinstance(part, PickledArray) for part in parts):
            raise pickle.UnpicklingError(f"the parts of {name!r} are not parts of an array")
        tree[name] = _Joined(parts, tuple(how["OriginShape"]))
