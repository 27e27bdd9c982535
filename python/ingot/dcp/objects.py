"""Objects of a state dict that are not tensors, stored as a training state: FORMAT.md, "Training state"."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ingot._base.frameworks import owner
from ingot._base.options import Loading
from ingot._base.text import located
from ingot._native import STATE_KEY, Checkpoint
from ingot._read.door import reading
from ingot._state.encoder import Encoder, Raw, json_of
from ingot._state.restoring import Contents
from ingot._write.states import head_of, tree_of
from ingot.errors import CheckpointError, SaveError
from ingot.torch._state import states

# The dtypes of numbers and bytes that are stored as tensors.
_OF_CODE = {"U8": torch.uint8, "I64": torch.int64, "F64": torch.float64, "BOOL": torch.bool}


class Stored(NamedTuple):
    """An object as a node of JSON, and the tensors that it names."""

    node: Any
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_object(item: WriteItem) -> bool:
    """Return whether an item is not a tensor."""
    return item.type is WriteItemType.BYTE_IO or item.tensor_data is None


def stored(plan: SavePlan, planner: SavePlanner, names: Iterable[str]) -> dict[str, Stored]:
    """Return the objects of a rank's plan. Their tensors get other names than `names`.

    Raises
    ------
    SaveError
        Only pickle could store an object, or the planner has no ``lookup_object``.
    """
    encoder = Encoder("torch", {})
    encoder.tensors.update(dict.fromkeys(names))
    found = {}
    for item in filter(is_object, plan.items):
        name, count = item.index.fqn, len(encoder.tensors)
        node = encoder.node(_object(planner, item), (name,))
        encoder.tie(node, [*islice(encoder.tensors, count, None)])
        # A dict keeps its order, so the new tensors are the last ones.
        own = islice(reversed(encoder.tensors.items()), len(encoder.tensors) - count)
        found[name] = Stored(node, {other: _tensor(other, value) for other, value in reversed([*own])})
    return found


def _object(planner: Any, item: WriteItem) -> Any:
    if not hasattr(planner, "lookup_object"):
        kind = type(planner).__name__
        reason = f"{kind} has no lookup_object, which returns objects that are not tensors"
        message = f"{reason}: derive it from DefaultSavePlanner"
        raise located(SaveError, message, code="no-tensor", tensor=item.index.fqn)
    return planner.lookup_object(item.index)


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, Raw):
        return torch.frombuffer(bytearray(value.data), dtype=_OF_CODE[value.dtype])
    if owner(value) == "numpy":
        with suppress(TypeError):
            return torch.from_numpy(value.copy())
    if not isinstance(value, torch.Tensor) or hasattr(value, "full_tensor"):
        kind = type(value).__name__
        reason = f"an object may contain tensors of torch and NumPy that ranks do not share, found {kind}"
        raise located(SaveError, reason, code="no-tensor", tensor=name)
    return value.detach().cpu().contiguous()


def record(objects: Mapping[str, Stored], names: Iterable[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata that describes objects and tensors, and the tensors to store for the objects."""
    tensors: dict[str, Any] = {}
    for one in objects.values():
        tensors |= one.tensors
    nodes = {
        **{name: one.node for name, one in objects.items()},
        **{name: {"$tensor": name} for name in names},
    }
    if any(name.startswith("$") for name in nodes):
        nodes = {"$dict": [[name, node] for name, node in nodes.items()]}
    encoder = Encoder("torch", {})
    taken = {*names, *tensors}
    encoder.tensors.update(dict.fromkeys(taken))
    found = encoder.described(json_of(nodes), flat=True)
    long = {name: _tensor(name, value) for name, value in encoder.tensors.items() if name not in taken}
    return found, tensors | long


class Objects:
    """The objects in the training states of files that `ingot.dcp.Writer` has written."""

    def __init__(self, files: Iterable[Checkpoint], types: tuple[type, ...]) -> None:
        self._types = types
        self._nodes: dict[str, tuple[Contents, Any]] = {}
        #: The names of the tensors that objects have.
        self.tensors: set[str] = set()
        for file in files:
            self._add(file)

    def _add(self, file: Checkpoint) -> None:
        contents = Contents(file, file)
        text = (file.metadata() or {}).get(STATE_KEY)
        head = head_of(text, contents.shown) if isinstance(text, str) else {}
        if head.get("flat") is not True:
            return
        tree = tree_of(head, contents.shown, lambda name: contents.raw(name, ())[1])
        named: set[str] = set()
        for name, node in _pairs(tree, contents.shown):
            if isinstance(node, dict) and isinstance(node.get("$tensor"), str):
                named.add(node["$tensor"])
            else:
                self._nodes[name] = contents, node
        self.tensors |= {*file.offset_names()} - named

    def names(self) -> list[str]:
        """Return the names of the objects."""
        return [*self._nodes]

    def pickled(self, name: str, how: Loading) -> io.BytesIO:
        """Return an object as planners expect it: pickled by this process, not by the writer of the file."""
        if name not in self._nodes:
            message = f"the checkpoint has no object {name!r}: a save replaced its files during the load"
            raise CheckpointError(message, code="changed", tensor=name)
        contents, node = self._nodes[name]
        with reading(contents.checkpoint, how) as reads:
            value = states.value_of({"$dict": [[name, node]]}, contents, reads, self._types)[name]
        held = io.BytesIO()
        torch.save(value, held)
        held.seek(0)
        return held


def _pairs(tree: Any, shown: str) -> Iterator[tuple[str, Any]]:
    pairs = tree.get("$dict", tree.items()) if isinstance(tree, dict) else None
    try:
        for name, node in pairs:  # type: ignore[union-attr]
            yield str(name), node
    except (TypeError, ValueError):
        reason = f"{shown}: {STATE_KEY} in the metadata is invalid: expected an object of values"
        raise CheckpointError(reason, code="invalid-state") from None
