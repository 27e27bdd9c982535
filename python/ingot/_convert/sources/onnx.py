"""ONNX: the tensors of graphs, functions and attributes, also those in other files of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.flatten import MAX_DEPTH
from ingot._convert.formats import inside
from ingot._convert.limits import OBJECT_NBYTES, VALUE_NBYTES
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Region, Stream, size_of, truncated
from ingot._convert.values import code_of, dtype_of, nbytes, unpacked

if TYPE_CHECKING:
    from ingot._convert.limits import Budget
    from ingot.numpy import Array

# Attributes of a Constant with its value, each with its ONNX dtype and its field.
_NUMBERS = {
    "value_float": ("F32", "f"),
    "value_floats": ("F32", "floats"),
    "value_int": ("I64", "i"),
    "value_ints": ("I64", "ints"),
}


def read(contents: Contents) -> None:
    """Add the tensors by name. Tensors in attributes are named after their nodes."""
    onnx = contents.library("onnx")
    with contents.reading():
        model = _model(contents, onnx)
        if not model.ir_version or not model.HasField("graph"):
            raise ValueError("it has no graph")
        walk = _Walk(contents, onnx)
        walk.graph("", model.graph, 0)
        for function in model.functions:
            walk.function(function)
        for number, training in enumerate(model.training_info):
            walk.graph(f"training_{number}.initialization.", training.initialization, 0)
            walk.graph(f"training_{number}.algorithm.", training.algorithm, 0)


def _model(contents: Contents, onnx: Any) -> Any:
    if contents.options.values:
        return onnx.load_model(contents.path, format="protobuf", load_external_data=False)
    with open(contents.path, "rb") as file:
        stream = Stream(contents.path, file)
        return onnx.ModelProto.FromString(_without_values(stream, "model", stream.end, 0, contents.budget))


# The structure of a model without the values of its tensors, which the package onnx would read into memory.
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
# The fields of a tensor that hold values: one for each kind, and raw bytes.
_VALUES = (4, 5, 6, 7, 9, 10, 11)
_VARINT, _SIZED, _FIXED = 0, 2, {1: 8, 5: 4}
_LONGEST_VARINT = 10


def _without_values(stream: Stream, kind: str, end: int, depth: int, budget: Budget) -> bytes:
    """Return the message from here to `end`, a position in the stream, without the values of its tensors."""
    if depth > 4 * MAX_DEPTH:
        raise ValueError("messages are nested too deep")
    budget.hold(OBJECT_NBYTES)
    kept = bytearray()
    while stream.tell() < end:
        tag = _varint(stream)
        number, wire = tag >> 3, tag & 7
        is_value = kind == "tensor" and number in _VALUES
        if wire == _SIZED:
            length = _varint(stream)
            if length > end - stream.tell():
                raise ValueError(f"truncated: expected {length} more bytes, found {end - stream.tell()}")
            body = b"" if is_value else _sized(stream, _WITHIN[kind].get(number), length, depth, budget)
            stream.skip(length if is_value else 0)
        elif wire == _VARINT:
            body = _encoded(_varint(stream))
        elif wire in _FIXED:
            body = stream.read(_FIXED[wire])
        else:
            raise ValueError(f"a field of the unknown kind {wire}")
        kept += b"" if is_value else _encoded(tag) + body
    if stream.tell() > end:
        raise ValueError("a number passes the end of its message")
    return bytes(kept)


def _sized(stream: Stream, within: str | None, length: int, depth: int, budget: Budget) -> bytes:
    """Return the length and the bytes of a field, which may be a message."""
    if within is None:
        budget.hold(length)
        body = stream.read(length)
    else:
        body = _without_values(stream, within, stream.tell() + length, depth + 1, budget)
    return _encoded(len(body)) + body


def _varint(stream: Stream) -> int:
    number = 0
    for place in range(_LONGEST_VARINT):
        (byte,) = stream.read(1)
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number
    raise ValueError(f"a number of more than {_LONGEST_VARINT} bytes")


def _encoded(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


class _Walk:
    """A walk through all places of a model that can have tensors."""

    def __init__(self, contents: Contents, onnx: Any) -> None:
        self._contents = contents
        self._onnx = onnx
        self._nodes_seen: set[str] = set()

    def graph(self, prefix: str, graph: Any, depth: int) -> None:
        """Add the tensors of a graph, and of the graphs in its nodes."""
        if depth > MAX_DEPTH:
            raise ValueError(f"graphs are nested more than {MAX_DEPTH} levels deep, which is the limit")
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
        for number, node in enumerate(nodes):
            where = prefix + (node.name or f"node_{number}")
            # Names grow with the depth: the name of a node is in the names of everything in its graphs.
            self._contents.budget.hold(OBJECT_NBYTES + len(where))
            if node.attribute and where in self._nodes_seen:
                # Different nodes may have the same name.
                where += f"_{number}"
            self._nodes_seen.add(where)
            for attribute in node.attribute:
                # The tensor of a Constant has the name of the node's output in the graph.
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
            # Trees and linear models have their weights in float attributes.
            self._contents.leave_out(name, "attribute", f"{len(attribute.floats)} floats")

    def _numbers(self, name: str, attribute: Any) -> None:
        code, field = _NUMBERS[attribute.name]
        values = getattr(attribute, field)
        self._contents.budget.hold(VALUE_NBYTES * (len(values) if field.endswith("s") else 1))
        array = numpy.array(values, dtype_of(code))
        self._contents.add(name, Entry, name, code, array.shape, lambda: array)

    def _sparse(self, name: str, sparse: Any) -> None:
        self._contents.leave_out(name, "sparse tensor", f"shape {list(sparse.dims)[:8]}")

    def _tensor(self, name: str, tensor: Any) -> None:
        self._contents.add(name, self._entry, name, tensor)

    def _entry(self, name: str, tensor: Any) -> Entry | LeftOut:
        contents, words = self._contents, self._onnx.TensorProto
        if tensor.data_type in (words.DataType.UNDEFINED, words.DataType.STRING):
            is_text = tensor.data_type == words.DataType.STRING
            return LeftOut(name, "tensor of text" if is_text else "tensor without a dtype")
        with contents.reading(name):
            dtype = self._onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            shape = tuple(tensor.dims)
            if any(size < 0 for size in shape):
                raise ValueError(f"shape {list(shape)[:8]}")
        code = code_of(contents.path, name, dtype)
        assert code is not None, "text was left out"
        if tensor.data_location != words.EXTERNAL:
            return Entry(name, code, shape, partial(self._onnx.numpy_helper.to_array, tensor))
        region = self._elsewhere(name, tensor, code, shape)

        def values() -> Array:
            raw = region.read(name)
            if code == "F4":
                raw = unpacked(raw)[: nbytes("U8", shape)]
            return raw.view(dtype_of(code)).reshape(shape)

        return Entry(name, code, shape, values, file=region.path)

    def _elsewhere(self, name: str, tensor: Any, code: str, shape: tuple[int, ...]) -> Region:
        """Return the bytes of a tensor in another file."""
        where = {pair.key: pair.value for pair in tensor.external_data}
        expected = nbytes(code, shape)
        with self._contents.reading(name):
            position, claimed = int(where.get("offset", 0)), int(where.get("length", expected))
        path = inside(self._contents.path, where.get("location"), name)
        self._contents.expect(name, code, shape, claimed)
        there = size_of(path) - position
        if position < 0 or expected > there:
            raise truncated(path, expected, max(there, 0), name)
        return Region(path, position, expected)


def _each(name: str, attribute: Any, one: str, many: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of an attribute that has one or many, each with its name."""
    if attribute.HasField(one):
        yield name, getattr(attribute, one)
    for number, value in enumerate(getattr(attribute, many)):
        yield f"{name}.{number}", value
