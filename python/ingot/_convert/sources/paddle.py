"""PaddlePaddle's .pdparams and other pickles of NumPy's arrays. Nothing that a pickle names is called.

Paddle keeps bfloat16 in NumPy's uint16. It marks its tensors: in a table of names beside them, or by how they
are pickled. Other arrays of uint16 are uint16; of a file called ``.pdparams`` the caller has to say so.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert import pickles
from ingot._convert.flatten import flatten
from ingot._convert.limits import reading, refused
from ingot._convert.pickles import ARRAY_CALLS, ArrayMachine, Bounded, Machine, PickledArray, is_array
from ingot._convert.report import Unusable
from ingot._convert.source import Contents, Entry, Options, size_of
from ingot._convert.values import dtype_of, elements

if TYPE_CHECKING:
    from ingot.numpy import Array

TITLE = "a pickle of arrays"
SUFFIXES = (".pdparams", ".pdopt")
# What `paddle.save` adds to a dict of tensors: the names of its parameters.
_NAME_TABLE = "StructuredToParameterName@@"
# Where it says how tensors of more than 4 GiB were cut, and below which name the parts stand.
_CUT = "UnpackBigParamInfor@@"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """Yield the arrays of nested dicts, named as `ingot._convert.flatten` says."""
    marked: set[int] = set()
    with reading(path, TITLE), open(path, "rb") as file:
        machine = _Machine(Bounded(path, file, size_of(path)), options.budget, marked)
        tree = machine.load()
        machine.expect_end()
        if isinstance(tree, dict):
            _join(tree)
            _take_names(tree, marked)
    is_paddle = options.source_format == "paddle" or path.lower().endswith(SUFFIXES)

    def entry(name: str, array: PickledArray) -> Entry:
        if array.fault is not None or array.dtype != numpy.uint16:
            return pickles.entry(path, name, array)
        if id(array) in marked or options.source_format == "paddle":
            return pickles.entry(path, name, array, dtype_of("BF16"))
        if is_paddle and options.source_format is None:
            raise refused(
                path,
                "uint16 without a mark of Paddle's, which keeps bfloat16 in it: source_format='paddle' makes "
                "BF16 of it, and source_format='pickle' U16",
                code="unclear-dtype",
                tensor=name,
                found="uint16",
            )
        return pickles.entry(path, name, array)

    entries, left_out = flatten(path, tree, is_array, entry, options.budget)
    yield Contents(entries, left_out, {"format": "paddle"} if is_paddle or marked else {})


class _Joined(PickledArray):
    """An array that older protocols had to cut, in one piece again."""

    def __init__(self, parts: list[PickledArray], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._parts = parts
        self.dtype, self.shape = parts[0].dtype, shape
        self.fault = next((part.fault for part in parts if part.fault is not None), None)
        if elements(shape) != sum(elements(part.shape) for part in parts):
            self.fault = Unusable(f"its parts do not make up its shape {list(shape)}", "size-mismatch")

    def read(self, name: str, dtype: numpy.dtype[Any] | None = None) -> Array:
        parts = [part.read(name, dtype).reshape(-1) for part in self._parts]
        return numpy.concatenate(parts).reshape(self.shape)


class _Machine(ArrayMachine):
    def __init__(self, source: Bounded, budget: Any, marked: set[int]) -> None:
        super().__init__(source, budget)
        self._marked = marked
        self.calls = ARRAY_CALLS | {
            "builtins.tuple": partial(_named, marked),
            "builtins.eval": partial(_data, marked),
        }


def _data(marked: set[int], _: Machine, expression: object = None, names: object = None) -> object:
    """Return the array of ``eval("data", {"data": array})``, by which Paddle pickles a kind of tensor."""
    if expression != "data" or not isinstance(names, dict) or names.keys() != {"data"}:
        raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
    if not isinstance(names["data"], PickledArray):
        raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
    marked.add(id(names["data"]))
    return names["data"]


def _named(marked: set[int], _: Machine, items: object = ()) -> object:
    """Return the array of ``tuple((name, array))``, by which Paddle pickles the others."""
    if isinstance(items, tuple) and [type(item) for item in items] == [str, PickledArray]:
        marked.add(id(items[1]))
        return items[1]
    return tuple(items) if isinstance(items, (tuple, list)) else ()


def _take_names(tree: dict[Any, Any], marked: set[int]) -> None:
    """Take out the table of names, which has one for each tensor of Paddle's."""
    table = tree.get(_NAME_TABLE)
    # A tensor of that name is a tensor.
    if isinstance(table, dict) and all(isinstance(name, str) for name in table.values()):
        del tree[_NAME_TABLE]
        marked.update(id(tree[key]) for key in table if key in tree)


def _join(tree: dict[Any, Any]) -> None:
    """Put tensors that were cut in one piece."""
    cut = tree.get(_CUT)
    if not isinstance(cut, dict):
        return
    del tree[_CUT]
    for name, how in cut.items():
        parts = [tree.pop(part) for part in how["slices"]]
        if name in tree or not parts or not all(isinstance(part, PickledArray) for part in parts):
            raise pickle.UnpicklingError(f"the parts of {name!r} are no parts of an array")
        tree[name] = _Joined(parts, tuple(how["OriginShape"]))
