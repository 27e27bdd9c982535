"""Save a training state by many ranks: each writes a file with the parts of tensors that it holds.

A tensor that several ranks hold whole is stored once, after they have compared their values. A buffer that
DistributedDataParallel broadcasts is stored by the sending rank. The first rank has the tree. An object with
a state of its own, such as a random number generator, is stored once if all ranks have the same state, and
otherwise once for each rank.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain, islice
from operator import is_
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ingot import SaveFuture
from ingot._base.options import Saving
from ingot._base.text import _quoted, located
from ingot._native import hash_object
from ingot._ranks.local import are_distributed, dtensor_class, held, is_distributed, is_dtensor
from ingot._ranks.peers import Peers, raw
from ingot._ranks.placements import Part
from ingot._state.encoder import Encoder, Raw, json_of
from ingot._state.face import Prepared, payload
from ingot._state.objects import TreePath, lives_in, spelled
from ingot._state.restoring import RANKS_TAG
from ingot._state.sections import Kept, Section
from ingot._state.wrappers import walked
from ingot._write.save import write_file
from ingot._write.states import tensors_in
from ingot.errors import SaveError
from ingot.typing import Path, Writable

from ._save_by_ranks import Collected, Holders, Spec, Together
from ._save_by_ranks import _Mine as Mine
from ._tensors import PLAIN_CLASSES, _export, copied, storable

#: The key of the parts of tensors in the metadata of a file: FORMAT.md, "Folders of checkpoints".
PARTS_KEY = "ingot.parts"

# The bytes that are compared at a time.
_WINDOW_NBYTES = 32 << 20


class PerRank(NamedTuple):
    """The state of an object that each rank may have for itself."""

    path: TreePath
    text: str
    names: list[str]


class Encoded(Encoder):
    """Splits the tree of a rank.

    Attributes
    ----------
    apart : list of PerRank
        The states of objects other than modules and optimizers. The node of each is its number under a tag.
    left : list of torch.Tensor
        Tensors that another rank stores.
    local : dict of str to tensor
        The memory of this rank by the names of the tensors, after `_structure`.
    """

    def __init__(self, states: Mapping[int, Any], apart: set[int], known: Mapping[TreePath, Section]) -> None:
        super().__init__("torch", states, known)
        self.apart: list[PerRank] = []
        self.left: list[torch.Tensor] = []
        self.local: dict[str, Any] = {}
        self._dtensor = dtensor_class()
        self._ids = apart

    def places(self, tensors: list[Any]) -> list[Any]:
        if not {*PLAIN_CLASSES, self._dtensor}.issuperset(map(type, tensors)):
            return [*map(self._place, tensors)]
        places = [*map(torch.Tensor.data_ptr, _locals(tensors))]
        return places if all(places) else [*map(self._place, tensors)]

    def _place(self, tensor: Any) -> Any:
        if type(tensor) in PLAIN_CLASSES:
            return tensor.data_ptr() or id(tensor)
        if isinstance(tensor, self._dtensor):
            local = tensor._local_tensor
            # An empty part has no address, and is tied where the other ranks' parts are.
            return local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset())
        return id(tensor)

    def key(self, tensor: Any) -> Any:
        place = self._place(tensor)
        if type(tensor) in PLAIN_CLASSES:
            return place, tensor.shape, tensor.stride(), tensor.dtype
        if isinstance(tensor, self._dtensor):
            local = tensor._local_tensor
            return place, tensor._spec.tensor_meta, local.shape, local.stride()
        return place

    def tree(self, tree: Any) -> Any:
        node = self.node(tree, ())
        apart = self.names_apart()
        self.tie(node, [name for name in self.tensors if name not in apart])
        return node

    def names_apart(self) -> set[str]:
        """Return the names of the tensors of the states apart."""
        return {name for one in self.apart for name in one.names}

    def _object(self, value: Any, path: TreePath) -> Any:
        if id(value) not in self._ids or self._is_hashed:
            return super()._object(value, path)
        first = len(self.tensors)
        node = super()._object(value, path)
        self.tie(node, [*islice(self.tensors, first, None)])
        own = [*islice(self.tensors, first, None)]
        if any(is_distributed(self.tensors[name]) for name in own):
            return node
        self.apart.append(PerRank(path, self.text(node), own))
        return {RANKS_TAG: len(self.apart) - 1}


class Plan(NamedTuple):
    """Who writes which tensors of a structure. It is kept for later saves of the same structure.

    Attributes
    ----------
    names, specs : list
        This rank's tensors, and their dtypes, shapes and placements.
    token : str
        Random digits, which the plans of all ranks have.
    mine : list of str
        The tensors that this rank writes.
    parts : str
        The record of those that are parts of tensors.
    replicas : dict of (tuple of int) to list of list of str
        The tensors whose values several ranks have to compare, by these ranks. Those with one dtype and shape
        are together.
    """

    names: list[str]
    specs: list[Any]
    token: str
    mine: list[str]
    parts: str
    replicas: dict[tuple[int, ...], list[list[str]]]


def prepared(states: Any, state: Any, peers: Peers, kept: Kept) -> Prepared:
    """Return a function that writes this rank's file. All ranks call it, and none has written anything.

    `kept` is of the save before, and then of this one.
    """
    with peers.step("looking at the state"):
        encoded, text, joint = _encoded(states, state, peers, kept.sections)
        kept.sections = encoded.sections
        names, specs = _structure(encoded)
        plan: Plan | None = kept.plan
        if plan is not None and not (plan.names == names and _are_same(plan.specs, specs)):
            plan = None
        apart = [_digest_of(encoded, one) for one in encoded.apart]
    paths = [spelled(one.path) for one in encoded.apart]
    facts = peers.gather(
        (plan and plan.token, sha256(text.encode()).digest(), paths, apart), "comparing the states"
    )
    tokens, texts, places, digests = zip(*facts, strict=True)
    tree = text if len({*texts}) == 1 else _tree(text, joint, peers)
    peers.alike("tree", [*places], "comparing the states")
    own = [at for at in range(len(apart)) if len({of_rank[at] for of_rank in digests}) > 1]
    if plan is None or len({*tokens}) > 1:
        plan = kept.plan = _planned(encoded, names, specs, peers)
    _compare(plan, encoded, state, peers)
    inner = _texts_apart(encoded, own, peers)

    # In a step of the caller, in which a failure of this rank is raised on all.
    def write(path: Path | Writable, how: Saving) -> SaveFuture | None:
        mine = dict(zip(plan.mine, map(encoded.local.__getitem__, plan.mine), strict=True))
        for at, one in enumerate(encoded.apart):
            if at in own:
                mine |= {f"{name}@{peers.rank}": encoded.tensors[name] for name in one.names}
            elif at % peers.size == peers.rank:
                mine |= {name: encoded.tensors[name] for name in one.names}
        if peers.rank == 0:
            before = len(encoded.tensors)
            record = encoded.described(_filled(tree, inner), ranks=peers.size)
            mine |= dict(islice(encoded.tensors.items(), before, None))
        else:
            record = Encoder("torch", {}).described("null", ranks=peers.size)
        return _write(mine, record, plan.parts, path, how)

    return write


def _write(
    mine: dict[str, Any], record: dict[str, str], parts: str, path: Path | Writable, how: Saving
) -> SaveFuture | None:
    how = how._replace(metadata={**(how.metadata or {}), PARTS_KEY: parts})
    known: dict[str, Any] = {"export": _export, "shared": "copy", "records": record}
    return write_file(path, mine, payload, how, copies=_copied, **known)


def _copied(stored: dict[str, Any]) -> dict[str, Any]:
    own = {name: one for name, one in stored.items() if isinstance(one, torch.Tensor)}
    return {**stored, **copied(own, "device")}


# Looking at a rank's state


def _encoded(
    states: Any, state: Any, peers: Peers, known: Mapping[TreePath, Section]
) -> tuple[Encoded, str, list[TreePath]]:
    """Return a rank's tensors, the text of its tree, and the paths of the modules and optimizers."""
    lives = lives_in(state)
    joint = (torch.nn.Module, torch.optim.Optimizer)
    apart = {id(live) for live in lives.values() if not isinstance(live, joint)}
    encoded = Encoded(states.states_of(lives), apart, known)
    text = encoded.text(encoded.tree(state))
    encoded.left = [*_received(lives.values(), peers)]
    return encoded, text, [path for path, live in lives.items() if isinstance(live, joint)]


def _received(lives: Iterable[Any], peers: Peers) -> Iterator[torch.Tensor]:
    """Yield the buffers that another rank stores, since it sends them to this one before a forward pass."""
    own = (live for live in lives if isinstance(live, torch.nn.Module) and walked(live).may_be_parallel)
    for one in chain.from_iterable(live.modules() for live in own):
        if isinstance(one, DistributedDataParallel) and one.broadcast_buffers:
            ignored, named = one.parameters_to_ignore, one.module.named_buffers()
            sent = [buffer for name, buffer in named if name not in ignored]
            if sent and _is_received(one.process_group, peers):
                yield from sent


def _is_received(group: Any, peers: Peers) -> bool:
    """Return whether another rank sends in a group, and saves too."""
    sender = dist.get_global_rank(group, 0)
    return sender != dist.get_rank() and sender in dist.get_process_group_ranks(peers.group)


def _structure(encoded: Encoded) -> tuple[list[str], list[Any]]:
    """Return the names of this rank's tensors, and the facts that decide which rank writes each."""
    left = encoded.names_apart() | _names_of(encoded.left, encoded)
    own = (
        {name: one for name, one in encoded.tensors.items() if name not in left} if left else encoded.tensors
    )
    names, values = [*own], [*own.values()]
    kind = dtensor_class()
    # Comparing classes takes a third of the time of `isinstance`.
    specs = [
        value._spec
        if type(value) is kind
        else (value.dtype, value.shape)
        if type(value) in PLAIN_CLASSES
        else _facts(value)
        for value in values
    ]
    may_be_parts = _may_be_parts(values)
    if may_be_parts:
        specs = [
            (spec, _of_distributed(name, value)[0]) if is_distributed(value) else spec
            for name, value, spec in zip(names, values, specs, strict=True)
        ]
    locals_ = map(_local, values) if may_be_parts else _locals(values)
    encoded.local = dict(zip(names, locals_, strict=True))
    # Tensors that are not divided among ranks.
    encoded.local |= {name: encoded.tensors[name] for name in left}
    return names, specs


def _names_of(tensors: list[torch.Tensor], encoded: Encoded) -> set[str]:
    """Return the names that these tensors have in a tree."""
    if not tensors:
        return set()
    places, keys = {*encoded.places(tensors)}, {*map(encoded.key, tensors)}
    found = zip(encoded.tensors.items(), encoded.places([*encoded.tensors.values()]), strict=True)
    return {name for (name, one), place in found if place in places and encoded.key(one) in keys}


def _may_be_parts(values: Iterable[Any]) -> bool:
    """Return whether tensors other than DTensors may be parts of tensors."""
    others = [value for value in values if type(value) in PLAIN_CLASSES]
    plain = {*PLAIN_CLASSES, dtensor_class(), Raw}
    return not plain.issuperset(map(type, values)) or are_distributed(others)


def _facts(value: Any) -> Any:
    if is_dtensor(value):
        return value._spec
    if type(value) is Raw:
        return (value.dtype, len(value.data))
    return getattr(value, "dtype", None), tuple(getattr(value, "shape", ()))


def _are_same(before: list[Any], now: list[Any]) -> bool:
    # Specs of DTensors are mostly the same objects, and slow to compare.
    return len(before) == len(now) and (all(map(is_, before, now)) or before == now)


def _locals(values: list[Any]) -> list[Any]:
    """Return the memory of this rank, of DTensors and tensors without parts."""
    kind = dtensor_class()
    # Without a call of Python for each of many.
    return [value._local_tensor if type(value) is kind else value for value in values]


def _local(value: Any) -> Any:
    """Return the memory of this rank."""
    if is_dtensor(value):
        return value._local_tensor
    return held(value).local if is_distributed(value) else value


def _digest_of(encoded: Encoded, one: PerRank) -> bytes:
    """Return the digest of a state apart, with its tensors."""
    total = sha256(one.text.encode())
    for name in one.names:
        total.update(_digest_among(encoded, [[name]]))
    return total.digest()


# The plan


class _Holding(Together):
    """The tensors of all ranks, of any class."""

    def _collect(self, collected: Collected) -> Mine:
        numbers: dict[Part, int] = {}
        kinds = array("I")
        specs = []
        # By what decides both, since a state has many equal ones.
        known: dict[Any, tuple[int, Spec]] = {}
        kind, may_be_parts = dtensor_class(), _may_be_parts([*collected.held.values()])
        for name, one in collected.held.items():
            value: Any = one
            key: Any = None
            if isinstance(value, kind):
                spec = value._spec
                key = spec.placements, id(spec.mesh), spec.tensor_meta
            elif type(value) in PLAIN_CLASSES and not may_be_parts:
                key = value.dtype, value.shape
            found = known.get(key)
            if found is None:
                part, whole = _outline(name, value)
                found = numbers.setdefault(part, len(numbers)), whole
                if key is not None:
                    known[key] = found
            kinds.append(found[0])
            specs.append(found[1])
        return Mine([*collected.held], specs, kinds, [*numbers], {})

    def __init__(self, tensors: Mapping[str, Any], peers: Peers) -> None:
        held: Any = tensors
        super().__init__(lambda: Collected(held, {}), peers)

    def holders(self) -> Mapping[str, Holders]:
        """Return the ranks that hold each tensor, and their parts."""
        return self._holders


def _outline(name: str, value: Any) -> tuple[Part, Spec]:
    """Return the part of a tensor that this rank holds, and what the whole tensor is."""
    if is_distributed(value):
        return _of_distributed(name, value)
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return Part.whole(shape), Spec(storable(name, value), shape, value.itemsize)
    made = payload(name, value)
    code, shape = made[0], tuple(made[1])
    return Part.whole(shape), Spec(code, shape, memoryview(made[2]).nbytes // max(1, _count(shape)))


def _count(shape: Iterable[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _of_distributed(name: str, value: Any) -> tuple[Part, Spec]:
    try:
        part, local = held(value)
    except ValueError as error:
        kind = type(value).__name__
        raise located(SaveError, f"{error}", code="no-values", tensor=name, found=kind) from None
    return part, Spec(storable(name, local), part.shape, local.itemsize)


def _planned(encoded: Encoded, names: list[str], specs: list[Any], peers: Peers) -> Plan:
    """Choose the tensors that each rank writes."""
    together = _Holding({name: encoded.tensors[name] for name in names}, peers)
    gathered = peers.gather((*_meshes(encoded, names), token_hex(8)), "planning")
    with peers.step("planning"):
        each = together.writers.items()
        mine = {name: part for name, writers in each for rank, part in writers if rank == peers.rank}
        replicas = {
            ranks: _groups(encoded, names) if peers.rank in ranks else [names]
            for ranks, names in _replicas(together.holders(), gathered).items()
        }
    return Plan(names, specs, gathered[0][2], [*mine], _record(mine), replicas)


def _record(mine: Mapping[str, Part]) -> str:
    """Return the record of the parts in a file: their shapes, and the intervals along each dimension."""
    # By identity first, since parts are slow to compare, and many tensors have one part.
    distinct = {id(part): part for part in mine.values()}
    parts = [*dict.fromkeys(part for part in distinct.values() if not part.is_whole())]
    places = {part: number for number, part in enumerate(parts)}
    numbers = {key: places.get(part, -1) for key, part in distinct.items()}
    of = {name: number for name, part in mine.items() if (number := numbers[id(part)]) >= 0}
    return json_of({"parts": [[part.shape, part.intervals] for part in parts], "tensors": of})


def _meshes(encoded: Encoded, names: list[str]) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Return the ranks of the meshes of this rank's DTensors, and the number of the mesh of each.

    Tensors of the first mesh, mostly all, are left out. The number of other tensors is -1.
    """
    meshes: dict[tuple[int, ...], int] = {}
    known: dict[int, int] = {}
    own: dict[str, int] = {}
    kind = dtensor_class()
    for name in names:
        value = encoded.tensors[name]
        if not isinstance(value, kind):
            own[name] = -1
            continue
        mesh = value._spec.mesh
        if id(mesh) not in known:
            known[id(mesh)] = meshes.setdefault(tuple(mesh.mesh.flatten().tolist()), len(meshes))
        if known[id(mesh)]:
            own[name] = known[id(mesh)]
    return [*meshes], own


def _mesh_of(name: str, rank: int, gathered: list[Any]) -> Any:
    """Return the ranks of the mesh of a rank's tensor. Without a mesh, a value that no other rank has."""
    meshes, own, _ = gathered[rank]
    number = own.get(name, 0)
    return rank if number < 0 else meshes[number]


def _replicas(holders: Mapping[str, Holders], gathered: list[Any]) -> dict[tuple[int, ...], list[str]]:
    """Return the tensors whose values have to be compared, by the ranks that hold the same part.

    Ranks of one mesh hold the same values by the definition of a DTensor.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    # Many tensors have the same holders, and meshes of the same numbers.
    known: dict[Any, list[tuple[int, ...]]] = {}
    numbers = [own.get for _, own, _ in gathered if own]
    for name, of in holders.items():
        key = id(of), *[number(name, 0) for number in numbers]
        ranks_of = known.get(key)
        if ranks_of is None:
            ranks_of = known[key] = _compared(name, of, gathered)
        for ranks in ranks_of:
            found.setdefault(ranks, []).append(name)
    return found


def _compared(name: str, of: Holders, gathered: list[Any]) -> list[tuple[int, ...]]:
    """Return the groups of ranks whose values of a tensor have to be equal."""
    if len(of) < 2 or len({_mesh_of(name, rank, gathered) for rank, _ in of}) == 1:
        return []
    parts: dict[Part, list[int]] = {}
    for rank, part in of:
        parts.setdefault(part, []).append(rank)
    return [tuple(ranks) for ranks in parts.values() if len(ranks) > 1]


# The tree


def _tree(text: str, joint: list[TreePath], peers: Peers) -> str:
    """Return the tree of all ranks, which may differ in the names within modules and optimizers."""
    gathered = peers.gather((text, joint), "comparing the trees")
    with peers.step("comparing the trees"):
        nodes = [json.loads(one) for one, _ in gathered]
        return json_of(_merged(nodes, (), {path for _, paths in gathered for path in paths}, peers))


def _merged(nodes: list[Any], path: TreePath, joint: set[TreePath], peers: Peers) -> Any:
    """Return the node of all ranks. Raises if they differ outside of the names of modules and optimizers."""
    first = nodes[0]
    other = next((rank for rank, one in enumerate(nodes) if one != first), None)
    if other is None:
        return first
    is_joint = any(path[: len(one)] == one for one in joint)
    kinds = set(map(type, nodes))
    if kinds == {dict}:
        names = dict.fromkeys(name for one in nodes for name in one)
        tagged = any(name.startswith("$") for name in names)
        if all(one.keys() == first.keys() for one in nodes) or (is_joint and not tagged):
            return {
                name: _merged(
                    [one[name] for one in nodes if name in one],
                    path if name.startswith("$") else (*path, name),
                    joint,
                    peers,
                )
                for name in names
            }
        if is_joint and tagged and "$dict" in names:
            raise _equal_keys(path, other, peers)
    if kinds == {list}:
        if is_joint and all(type(one) is str for of in nodes for one in of):
            # The names of the parameters of a group.
            return [*dict.fromkeys(one for of in nodes for one in of)]
        if len({len(one) for one in nodes}) == 1:
            places = range(len(first))
            inner = path if is_joint else None
            return [
                _merged([one[at] for one in nodes], (*path, at) if inner is None else inner, joint, peers)
                for at in places
            ]
        if is_joint:
            raise _equal_keys(path, other, peers)
    raise _differs(path, first, nodes[other], other, peers)


def _equal_keys(path: TreePath, rank: int, peers: Peers) -> SaveError:
    place = spelled(path)
    reason = f"rank {rank} of {peers.size} has another state than rank 0 under equal integers"
    way_out = "put the module of the parameters into the same tree, for their names"
    return SaveError(f"{_quoted(place)}: {reason}: {way_out}", code="equal-keys", tensor=place, found=rank)


def _differs(path: TreePath, expected: Any, found: Any, rank: int, peers: Peers) -> SaveError:
    place = spelled(path)
    shown = [f"{json_of(one)[:80]}" for one in (expected, found)]
    reason = (
        f"rank {rank} of {peers.size} has another value than rank 0: expected {shown[0]}, found {shown[1]}"
    )
    way_out = "make them equal, or put them into an object with state_dict, which is saved for each rank"
    return SaveError(f"{_quoted(place)}: {reason}: {way_out}", code="ranks-differ", tensor=place, found=found)


def _texts_apart(encoded: Encoded, own: list[int], peers: Peers) -> list[str]:
    """Return the nodes of the states apart as JSON. If the states of ranks differ, the node is their list."""
    texts = [one.text for one in encoded.apart]
    renamed: dict[int, str] = {}
    for at in own:
        node = json.loads(texts[at])
        for inner, tag, name in [*tensors_in(node)]:
            called = f"{name}@{peers.rank}"
            inner[tag] = [called, inner[tag][1]] if type(inner[tag]) is list else called
        renamed[at] = json_of(node)
    gathered = peers.gather(renamed, "comparing the states") if own else []
    for at in own:
        texts[at] = f'{{"{RANKS_TAG}":[{",".join(one[at] for one in gathered)}]}}'
    return texts


def _filled(tree: str, texts: list[str]) -> str:
    """Return the tree with the states apart in their places."""
    for at, text in enumerate(texts):
        # The tree has no other such object: keys of the caller that begin with "$" are stored in another
        # form.
        tree = tree.replace(json_of({RANKS_TAG: at}), text)
    return tree


# Values that several ranks hold


def _compare(plan: Plan, encoded: Encoded, state: Any, peers: Peers) -> None:
    """Raise on all ranks if tensors that several ranks hold have different values."""
    doing = "comparing tensors that several ranks have"
    groups = plan.replicas.items()
    with peers.step(doing):
        own = {ranks: _digest_among(encoded, names) for ranks, names in groups if peers.rank in ranks}
    gathered = peers.gather(own, doing)
    differing = [ranks for ranks in plan.replicas if len({gathered[rank][ranks] for rank in ranks}) > 1]
    if not differing:
        return
    ranks = differing[0]
    names = sorted(chain.from_iterable(plan.replicas[ranks]))
    mine = [_digest_among(encoded, [[name]]) for name in names] if peers.rank in ranks else []
    each = peers.gather(mine, doing)
    for at, name in enumerate(names):
        other = next((rank for rank in ranks if each[rank][at] != each[ranks[0]][at]), None)
        if other is not None:
            is_buffer = name in _names_of([*_buffers(state)], encoded)
            raise _mixed(name, ranks[0], other, peers, is_buffer)


def _buffers(state: Any) -> Iterator[torch.Tensor]:
    for live in lives_in(state).values():
        if isinstance(live, torch.nn.Module):
            yield from live.buffers()


def _mixed(name: str, first: int, rank: int, peers: Peers, is_buffer: bool) -> SaveError:
    reason = f"ranks {first} and {rank} of {peers.size} have different values, and a tensor is stored once"
    way_out = "broadcast it, call it differently on each rank, or have an object with state_dict keep it"
    if is_buffer:
        wrapper = "put the DistributedDataParallel that broadcasts it into the state, not its module"
        way_out = f"{wrapper}; or make it equal, by SyncBatchNorm or torch.distributed.broadcast"
    return located(SaveError, f"{reason}: {way_out}", code="ranks-differ", tensor=name, found=rank)


def _digest_among(encoded: Encoded, groups: Iterable[list[str]]) -> bytes:
    """Return a digest of the bytes of tensors, in groups with one dtype and shape."""
    total = sha256()
    for names in groups:
        for piece in _in_windows(names, [encoded.local[name] for name in names]):
            total.update(bytes.fromhex(hash_object(piece, "a tensor", "blake3") or ""))
    return total.digest()


def _groups(encoded: Encoded, names: list[str]) -> list[list[str]]:
    """Return the names of tensors with one dtype and shape together."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        value = encoded.local[name]
        is_tensor = isinstance(value, torch.Tensor)
        groups.setdefault((value.dtype, value.shape) if is_tensor else name, []).append(name)
    return [*groups.values()]


def _in_windows(names: list[str], group: list[Any]) -> Iterator[memoryview]:
    """Yield the bytes of tensors with one dtype and shape."""
    if not isinstance(group[0], torch.Tensor):
        yield memoryview(payload(names[0], group[0])[2]).cast("B")
        return
    count = _WINDOW_NBYTES // max(1, group[0].nbytes) + 1
    yield from (_bytes_of(group[at : at + count]) for at in range(0, len(group), count))


@torch.no_grad()
def _bytes_of(group: list[torch.Tensor]) -> memoryview:
    """Return the bytes of tensors with one dtype and shape."""
    plain = group
    if group[0].is_complex():
        plain = [torch.view_as_real(one.resolve_conj()) for one in group]
    elif group[0].itemsize == 1:
        # torch joins its rarer dtypes as bytes only.
        plain = [raw(one) for one in group]
    if len({one.device for one in plain}) > 1:
        plain = [one.cpu() for one in plain]
    joined = torch.cat if plain[0].dim() else torch.stack
    flat = plain[0] if len(plain) == 1 else joined(plain)
    found: Any = flat.detach().resolve_neg().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
    return memoryview(found)
