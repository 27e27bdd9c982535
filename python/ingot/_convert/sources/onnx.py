"""ONNX initializers, those in other files too, which have to lie in the folder of the model."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ingot._convert.confined import inside
from ingot._convert.flatten import MAX_DEPTH
from ingot._convert.limits import OBJECT_NBYTES, RECORD_NBYTES
from ingot._convert.positions import Region, cut_short, size_of
from ingot._convert.protobuf import without_values
from ingot._convert.refusal import lacks, reading, refused
from ingot._convert.source import Contents, Entry, LeftOut, Options, possible
from ingot._convert.values import code_of, dtype_of, nbytes
from ingot._text import _quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._convert.limits import Budget
    from ingot.numpy import Array

TITLE = "an ONNX model"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The initializers of the graph by name; those of graphs within nodes behind the names of these."""
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
    yield Contents(walk.entries, walk.left_out)


def _model(onnx: Any, path: str, options: Options) -> Any:
    if options.values:
        return onnx.load_model(path, format="protobuf", load_external_data=False)
    with open(path, "rb") as file:
        return onnx.ModelProto.FromString(without_values(file, size_of(path), options.budget))


class _Walk:
    def __init__(self, path: str, onnx: Any, budget: Budget) -> None:
        self._path = path
        self._budget = budget
        self._onnx = onnx
        self.entries: list[Entry] = []
        self.left_out: list[LeftOut] = []

    def graph(self, prefix: str, graph: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(
                f"graphs stand in each other more than {MAX_DEPTH} levels deep, which is the limit"
            )
        # Names grow with the depth: that of a node stands in those of all that is in its graphs.
        tensors = len(graph.initializer) + len(graph.sparse_initializer)
        self._budget.hold((RECORD_NBYTES + len(prefix)) * (tensors + 1) + OBJECT_NBYTES * len(graph.node))
        for tensor in graph.initializer:
            self._tensor(prefix + tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            self.left_out.append(LeftOut(prefix + sparse.values.name, "sparse tensor"))
        for number, node in enumerate(graph.node):
            for attribute in node.attribute:
                graphs = [attribute.g] if attribute.HasField("g") else attribute.graphs
                for inner in graphs:
                    name = node.name or f"node_{number}"
                    self.graph(f"{prefix}{name}.{attribute.name}.", inner, depth + 1)

    def _tensor(self, name: str, tensor: Any) -> None:
        words = self._onnx.TensorProto.DataType
        if tensor.data_type in (words.UNDEFINED, words.STRING):
            self.left_out.append(LeftOut(name, "tensor of text"))
            return
        self.entries.append(possible(name, self._entry, name, tensor))

    def _entry(self, name: str, tensor: Any) -> Entry:
        code = code_of(self._path, name, self._onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        assert code is not None
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise ValueError(f"tensor {name!r} has shape {list(shape)}")
        if tensor.data_location != self._onnx.TensorProto.EXTERNAL:
            return Entry(name, code, shape, partial(self._values, name, tensor))
        region = self._elsewhere(name, tensor, code, shape)
        read = partial(region.array, name, dtype_of(code), shape)
        return Entry(name, code, shape, read, file=region.path)

    def _values(self, name: str, tensor: Any) -> Array:
        with reading(self._path, f"an ONNX model with tensor {_quoted(name)}"):
            array: Array = self._onnx.numpy_helper.to_array(tensor)
            return array

    def _elsewhere(self, name: str, tensor: Any, code: str, shape: tuple[int, ...]) -> Region:
        where = {pair.key: pair.value for pair in tensor.external_data}
        other = inside(self._path, where.get("location"), name)
        position, there = int(where.get("offset", 0)), size_of(other)
        expected = nbytes(code, shape)
        claimed = int(where.get("length", expected))
        if code == "F4" or claimed != expected:
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
