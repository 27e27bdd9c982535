"""ONNX: the tensors of graphs, functions and attributes, also those in other files of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import numpy

from ingot._convert.flatten import MAX_DEPTH
from ingot._convert.formats import inside
from ingot._convert.limits import OBJECT_NBYTES, RECORD_NBYTES, VALUE_NBYTES, lacks, reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, Region, cut_short, possible, size_of
from ingot._convert.values import code_of, dtype_of, nbytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array


# ONNX models without the values of their tensors, which the package onnx would read into memory first.
#
# https://protobuf.dev/programming-guides/encoding/


# The messages within a message, by the numbers of their fields in onnx.proto.
_WITHIN = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
# The fields of a tensor that hold values: of each kind, and raw.
_VALUES = (4, 5, 6, 7, 9, 10, 11)
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10


def without_values(file: IO[bytes], nbytes: int, budget: Budget) -> bytes:
    """Return the message in `file`, of `nbytes` bytes, without the values of its tensors."""
    return _Skimmer(file, budget).message("model", nbytes, 0)


class _Skimmer:
    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def message(self, kind: str, end: int, depth: int) -> bytes:
        """The message from here to `end`, a position of the file."""
        if depth > 4 * MAX_DEPTH:
            raise ValueError("messages stand in each other too deep")
        self._budget.hold(OBJECT_NBYTES)
        kept = bytearray()
        while self._file.tell() < end:
            tag = self._varint()
            kept += self._field(kind, tag, end, depth)
        if self._file.tell() > end:
            raise ValueError("a number passes the end of its message")
        return bytes(kept)

    def _field(self, kind: str, tag: int, end: int, depth: int) -> bytes:
        number, wire = tag >> 3, tag & 7
        is_value = kind == "tensor" and number in _VALUES
        if wire == _VARINT:
            body = _encoded(self._varint())
        elif wire in (_EIGHT, _FOUR):
            body = self._take(8 if wire == _EIGHT else 4, end)
        elif wire == _SIZED:
            length = self._varint()
            stop = self._file.tell() + length
            if stop > end:
                raise ValueError(f"cut short: expected {length} more bytes, found {end - self._file.tell()}")
            if is_value:
                self._file.seek(stop)
                return b""
            within = _WITHIN[kind].get(number)
            body = self._take(length, end) if within is None else self.message(within, stop, depth + 1)
            body = _encoded(len(body)) + body
        else:
            raise ValueError(f"a field of the unknown kind {wire}")
        return b"" if is_value else _encoded(tag) + body

    def _take(self, nbytes: int, end: int) -> bytes:
        there = end - self._file.tell()
        if nbytes > there:
            raise ValueError(f"cut short: expected {nbytes} more bytes, found {there}")
        self._budget.hold(nbytes)
        return self._file.read(nbytes)

    def _varint(self) -> int:
        number = 0
        for place in range(_LONGEST_VARINT):
            byte = self._file.read(1)
            if not byte:
                raise ValueError("cut short within a number")
            number |= (byte[0] & 0x7F) << (7 * place)
            if byte[0] < 0x80:
                return number
        raise ValueError(f"a number of more than {_LONGEST_VARINT} bytes")


def _encoded(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


TITLE = "an ONNX model"
# Attributes of a Constant that are its value, with their dtypes in ONNX.
_NUMBERS = {"value_float": "F32", "value_floats": "F32", "value_int": "I64", "value_ints": "I64"}


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """Yield the tensors by name. Tensors in attributes are named after their nodes."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise lacks("onnx", TITLE, "convert") from error
    with reading(path, TITLE):
        model = _model(onnx, path, options)
        if not model.ir_version or not model.HasField("graph"):
            raise ValueError("it has no graph")
        walk = _Walk(path, onnx, options.budget)
        walk.graph("", model.graph, 0)
        for function in model.functions:
            walk.function(function)
        for number, training in enumerate(model.training_info):
            walk.graph(f"training_{number}.initialization.", training.initialization, 0)
            walk.graph(f"training_{number}.algorithm.", training.algorithm, 0)
    yield Contents(walk.entries, walk.left_out)


def _model(onnx: Any, path: str, options: Options) -> Any:
    if options.values:
        return onnx.load_model(path, format="protobuf", load_external_data=False)
    with open(path, "rb") as file:
        return onnx.ModelProto.FromString(without_values(file, size_of(path), options.budget))


class _Walk:
    """The way through all places of a model that have tensors."""

    def __init__(self, path: str, onnx: Any, budget: Budget) -> None:
        self._path = path
        self._budget = budget
        self._onnx = onnx
        self._nodes_seen: set[str] = set()
        self.entries: list[Entry] = []
        self.left_out: list[LeftOut] = []

    def graph(self, prefix: str, graph: Any, depth: int) -> None:
        """Add the tensors of a graph, and of the graphs in its nodes."""
        if depth > MAX_DEPTH:
            raise ValueError(
                f"graphs stand in each other more than {MAX_DEPTH} levels deep, which is the limit"
            )
        # Names grow with the depth: that of a node stands in those of all that is in its graphs.
        tensors = len(graph.initializer) + len(graph.sparse_initializer)
        self._budget.hold((RECORD_NBYTES + len(prefix)) * (tensors + 1))
        for tensor in graph.initializer:
            self._tensor(prefix + tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            self._sparse(prefix + sparse.values.name, sparse)
        self._nodes(prefix, graph.node, depth)

    def function(self, function: Any) -> None:
        """Add the tensors of a function, which are named below it."""
        prefix = ".".join(filter(None, (function.domain, function.name, function.overload))) + "."
        for attribute in function.attribute_proto:
            self._attribute(f"{prefix}{attribute.name}", attribute, 0)
        self._nodes(prefix, function.node, 0)

    def _nodes(self, prefix: str, nodes: Any, depth: int) -> None:
        self._budget.hold(OBJECT_NBYTES * len(nodes))
        for number, node in enumerate(nodes):
            where = prefix + (node.name or f"node_{number}")
            if node.attribute and where in self._nodes_seen:
                # Nodes may have the same name.
                where += f"_{number}"
            self._nodes_seen.add(where)
            for attribute in node.attribute:
                # A graph calls the tensor of a Constant by the output of the node.
                is_constant = node.op_type == "Constant" and node.output
                name = prefix + node.output[0] if is_constant else f"{where}.{attribute.name}"
                if is_constant and attribute.name in _NUMBERS:
                    self._numbers(name, attribute)
                else:
                    self._attribute(name, attribute, depth)

    def _attribute(self, name: str, attribute: Any, depth: int) -> None:
        """Add all tensors of an attribute."""
        for place, tensor in _each(name, attribute, "t", "tensors"):
            self._tensor(place, tensor)
        for place, sparse in _each(name, attribute, "sparse_tensor", "sparse_tensors"):
            self._sparse(place, sparse)
        for place, graph in _each(name, attribute, "g", "graphs"):
            self.graph(f"{place}.", graph, depth + 1)
        if attribute.floats:
            # Trees and linear models have their weights in such.
            self._budget.hold(RECORD_NBYTES + len(name))
            self.left_out.append(LeftOut(name, "attribute", f"{len(attribute.floats)} floats"))

    def _numbers(self, name: str, attribute: Any) -> None:
        code = _NUMBERS[attribute.name]
        word = attribute.name.removeprefix("value_")
        values = {
            "float": attribute.f,
            "floats": attribute.floats,
            "int": attribute.i,
            "ints": attribute.ints,
        }[word]
        self._budget.hold(RECORD_NBYTES + len(name) + VALUE_NBYTES * (len(values) if word[-1] == "s" else 1))
        array = numpy.array(values, dtype_of(code))
        self.entries.append(Entry(name, code, array.shape, lambda: array))

    def _sparse(self, name: str, sparse: Any) -> None:
        self._budget.hold(RECORD_NBYTES + len(name))
        self.left_out.append(LeftOut(name, "sparse tensor", f"shape {list(sparse.dims)[:8]}"))

    def _tensor(self, name: str, tensor: Any) -> None:
        words = self._onnx.TensorProto.DataType
        self._budget.hold(RECORD_NBYTES + len(name))
        if tensor.data_type in (words.UNDEFINED, words.STRING):
            kind = "tensor of text" if tensor.data_type == words.STRING else "tensor without a dtype"
            self.left_out.append(LeftOut(name, kind))
            return
        self.entries.append(possible(name, self._entry, name, tensor))

    def _entry(self, name: str, tensor: Any) -> Entry:
        with reading(self._path, TITLE, name):
            dtype = self._onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            shape = tuple(tensor.dims)
            if any(size < 0 for size in shape):
                raise ValueError(f"shape {list(shape)[:8]}")
        code = code_of(self._path, name, dtype)
        assert code is not None, "text was left out"
        if tensor.data_location != self._onnx.TensorProto.EXTERNAL:
            return Entry(name, code, shape, partial(self._values, name, tensor))
        region = self._elsewhere(name, tensor, code, shape)

        def read() -> Array:
            raw = region.read(name)
            if code == "F4":
                # Two elements to a byte, the first in the lower half.
                raw = numpy.stack([raw & 15, raw >> 4], -1).reshape(-1)[: nbytes("U8", shape)]
            return raw.view(dtype_of(code)).reshape(shape)

        return Entry(name, code, shape, read, file=region.path)

    def _values(self, name: str, tensor: Any) -> Array:
        with reading(self._path, TITLE, name):
            array: Array = self._onnx.numpy_helper.to_array(tensor)
            return array

    def _elsewhere(self, name: str, tensor: Any, code: str, shape: tuple[int, ...]) -> Region:
        where = {pair.key: pair.value for pair in tensor.external_data}
        expected = nbytes(code, shape)
        with reading(self._path, TITLE, name):
            position, claimed = int(where.get("offset", 0)), int(where.get("length", expected))
        other = inside(self._path, where.get("location"), name)
        there = size_of(other)
        if claimed != expected:
            raise refused(
                self._path,
                f"shape {list(shape)} of {code} needs {expected} bytes, and it says {claimed}",
                code="size-mismatch",
                tensor=name,
                expected=expected,
                found=claimed,
            )
        if position < 0 or position + expected > there:
            raise cut_short(other, name, expected, max(there - position, 0))
        return Region(other, position, expected)


def _each(name: str, attribute: Any, one: str, many: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of an attribute that has one or many, each with its name."""
    if attribute.HasField(one):
        yield name, getattr(attribute, one)
    for number, value in enumerate(getattr(attribute, many)):
        yield f"{name}.{number}", value
