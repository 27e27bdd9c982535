"""Messages between ranks: bytes of tensors, objects and failures.

A rank enters a collective only after all ranks have agreed that none has failed, so that no rank waits in
vain. Ranks that wait for a killed rank detect it, and inform the others through the process group's store.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from math import prod
from socket import gethostname
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from ingot.errors import RankError

from .placements import Box

T = TypeVar("T")

# Pieces of tensors are sent between ranks as consecutive bytes without a dtype.


# Integers of the size of an element, since copying them changes no value.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The alignment of pieces in bytes, which suits every dtype.
_ALIGNMENT = 16


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as integers of the size of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_RAW[tensor.itemsize])


def padded(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of a piece with its padding."""
    nbytes: int = prod(shape) * itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def sides(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(side.stop - side.start for side in box)


class Parcels(NamedTuple):
    """The bytes that a rank sends to each rank and receives from each, in the order of the ranks."""

    to_each: list[int]
    sent: torch.Tensor
    from_each: list[int]
    received: torch.Tensor

    @classmethod
    def of(cls, for_each: Sequence[Sequence[torch.Tensor]], from_each: list[int]) -> Parcels:
        """Pack the pieces to send, and allocate memory for the bytes to receive."""
        sizes = [sum(padded(piece.shape, piece.itemsize) for piece in pieces) for pieces in for_each]
        run = Run(buffer(sum(sizes)))
        for pieces in for_each:
            for piece in pieces:
                run.take(tuple(piece.shape), piece.itemsize).copy_(raw(piece))
        return cls(sizes, run.memory, from_each, buffer(sum(from_each)))


# glibc may keep freed memory of up to 32 MiB, and returns more than that to the system at once.
_MAPPED_NBYTES = (32 << 20) + 1
_SMALL_NBYTES = 1 << 20


def buffer(nbytes: int) -> torch.Tensor:
    """Return bytes for a window, which return to the system when they are freed.

    Pages that are reserved and not written take no memory.
    """
    reserved = nbytes if nbytes < _SMALL_NBYTES else max(nbytes, _MAPPED_NBYTES)
    return torch.empty(reserved, dtype=torch.uint8)[:nbytes]


class Run:
    """Memory from which pieces are read in the order in which they were packed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._at = 0

    def take(self, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
        """Return the next piece."""
        nbytes = prod(shape) * itemsize
        piece = self.memory[self._at : self._at + nbytes]
        self._at += padded(shape, itemsize)
        return piece.view(_RAW[itemsize]).view(shape)


# Seconds for which a rank that found a failure waits for the others to report.
_ROLL_CALL_SECONDS = 3.0
# Seconds between two checks of the store while a rank waits.
_CHECK_SECONDS = 0.25
# The bytes of a first message, including 8 for the length of the data.
_SHORT_NBYTES = 1024
# Seconds within which all ranks have to connect for background saves.
_CONNECT_SECONDS = 60.0
# Process groups for tensors on the CPU, by process groups without one.
_ON_CPU: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# The number of `Peers` made for each group, since the name of a group may be reused on the same store.
_MEETINGS: dict[str, int] = {}


class Problem(NamedTuple):
    """The error of a rank, for the messages of the others."""

    rank: int
    doing: str
    error: str


def this_node() -> str:
    """Return a name that is equal on all ranks of one machine."""
    return gethostname()


class _BackgroundGroup:
    """Connections between the ranks of a group that only their background saves use."""

    def __init__(self, gloo: Any, number: int) -> None:
        #: None after a rank was lost, since the connections may still contain earlier messages.
        self.gloo = gloo
        # The same on all ranks.
        self.number = number


# They are released with the group.
_APART: WeakKeyDictionary[Any, _BackgroundGroup] = WeakKeyDictionary()


class Peers:
    """The ranks of a process group, for one load or save that all of them take part in."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        given: Any = dist.group.WORLD if group is None else group
        self.group = given
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._cpu: Any = _on_cpu(self.group)
        name = self.group.group_name
        self._number = _MEETINGS[name] = _MEETINGS.get(name, 0) + 1
        self._store = c10d.PrefixStore(f"ingot/{name}/{self._number}", c10d._get_default_store())
        self._apart: _BackgroundGroup | None = None

    def apart(self) -> Peers:
        """Return these ranks over separate connections, for a thread beside the program's collectives.

        All ranks call it. The thread then uses no collective of the caller's group, whose order must be the
        same on all ranks, and the program may destroy its process groups while the thread runs.
        """
        own = _APART.get(self.group)
        numbers = self.gather(own.number if own and own.gloo is not None else 0, "connecting")
        if own is None or set(numbers) != {own.number}:
            with self.step("connecting"):
                own = _APART[self.group] = _BackgroundGroup(self._connected(), self._number)
        there = copy(self)
        there._cpu, there._apart = own.gloo, own
        # A separate client, since a client that waits for a key holds its lock.
        store: Any = c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store
        there._store = c10d.PrefixStore(f"ingot/{self.group.group_name}/{self._number}/apart", store)
        return there

    @classmethod
    def separate(cls, group: dist.ProcessGroup | None, called: str) -> Peers:
        """Return the ranks of a group over connections of their own. All ranks call it with the same name.

        No collective of the group is used, so the program may run its own meanwhile.

        Raises
        ------
        RankError
            A rank does not call it within a minute.
        """
        there = object.__new__(cls)
        own: Any = dist.group.WORLD if group is None else group
        there.group = own
        there.rank, there.size = dist.get_rank(there.group), dist.get_world_size(there.group)
        there._number = 0
        store: Any = c10d._get_default_store()
        # A separate client, since a client that waits for a key holds its lock.
        store = store.clone() if hasattr(store, "clone") else store
        there._store = c10d.PrefixStore(f"ingot/{own.group_name}/{called}", store)
        there._cpu = there._apart = None
        try:
            there._store.set(f"met/{there.rank}", "")
            there._cpu = there._connected()
        except (RuntimeError, dist.DistError) as fault:
            raise there._absent(fault) from None
        there._apart = _BackgroundGroup(there._cpu, 0)
        return there

    def _absent(self, fault: Exception) -> RankError:
        """Return the error that names a rank that has not called `separate`."""
        try:
            absent = [rank for rank in range(self.size) if not self._store.check([f"met/{rank}"])]
        except (RuntimeError, dist.DistError):
            return self.error(0, "hosts the store and was lost: the others connect to it", "rank-lost")
        if not absent:
            return self.error(self.rank, f"could not connect to the others: {fault}", "rank-lost")
        reason = f"was lost, or did not make the same call within {_CONNECT_SECONDS:.0f} seconds"
        # The usual cause is a call under `if rank == 0`.
        way_out = "all ranks have to make each call, also steps() and latest()"
        return self.error(absent[0], f"{reason}: {way_out}", "rank-lost")

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost, so that the connections cannot be used any more."""
        return self._apart is None or self._apart.gloo is None

    def leave(self) -> None:
        """Leave the group. Ranks that wait for this rank stop waiting and report that it has left."""
        if _APART.get(self.group) is self._apart:
            _APART.pop(self.group, None)
        held = [self._cpu, self._apart]
        self.done()
        _drop(held)
        with suppress(RuntimeError, dist.DistError):
            self._store.set("lost", "")

    def close(self) -> None:
        """Close separate connections, which the other ranks no longer need."""
        held = [self._cpu, self._apart]
        self.done()
        _drop(held)

    def done(self) -> None:
        """Release the connections of background saves, which wait for the next save.

        Waits of other ranks end when all references to the connections are gone, but a traceback may keep
        this object alive for long.
        """
        self._cpu = self._apart = None

    def _connected(self) -> Any:
        store = c10d.PrefixStore("connections", self._store)
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)
        # A rank may write for any length of time, since waiting ranks detect lost ranks.
        gloo._set_default_timeout(default_pg_timeout)
        return gloo

    def gather(self, mine: Any, doing: str) -> list[Any]:
        """Return the objects of all ranks, in their order.

        Raises
        ------
        RankError
            A rank is `doing` something else (``code`` is ``"ranks-differ"``), or failed.
        """
        found = self._objects((doing, mine), doing)
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                reason = f"is {other}, and rank 0 is {found[0][0]}"
                way_out = "all ranks have to make the same calls in the same order"
                raise self.error(rank, f"{reason}: {way_out}", "ranks-differ")
        return [one for _, one in found]

    def _objects(self, mine: Any, doing: str) -> list[Any]:
        data = pickle.dumps(mine)
        heads = self._gathered(_begin(data), _SHORT_NBYTES, doing)
        most = max(int.from_bytes(one[:8], "little") for one in heads)
        # `loads` ignores the padding after a pickle.
        if most <= _SHORT_NBYTES - 8:
            return [pickle.loads(one[8:]) for one in heads]
        return [pickle.loads(one) for one in self._gathered(data, most, doing)]

    def broadcast(self, mine: Any, doing: str) -> Any:
        """Return the first rank's object, on all ranks."""
        data = pickle.dumps(mine) if self.rank == 0 else b""
        head = self._sent(_begin(data), _SHORT_NBYTES, doing)
        nbytes = int.from_bytes(head[:8], "little")
        # `loads` ignores the padding after a pickle.
        short = nbytes <= _SHORT_NBYTES - 8
        return pickle.loads(head[8:] if short else self._sent(data, nbytes, doing))

    def _sent(self, mine: bytes, nbytes: int, doing: str) -> bytearray:
        """Send `nbytes` bytes of the first rank to all."""
        held = bytearray(mine.ljust(nbytes, b"\0"))
        first = dist.get_global_rank(self.group, 0)
        data = torch.frombuffer(held, dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(data, first, self._cpu, async_op=True), doing)
        return held

    def _gathered(self, mine: bytes, nbytes: int, doing: str) -> list[bytearray]:
        """Return this many bytes of each rank. The last bytes may be padding."""
        held = [bytearray(nbytes) for _ in range(self.size)]
        found = [torch.frombuffer(one, dtype=torch.uint8) for one in held]
        sent = torch.frombuffer(bytearray(mine.ljust(nbytes, b"\0")), dtype=torch.uint8)
        self._wait(lambda: dist.all_gather(found, sent, self._cpu, async_op=True), doing)
        return held

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Run the body on each rank; then all ranks continue, or all raise."""
        fault: BaseException | None = None
        try:
            yield
        except BaseException as error:
            if isinstance(error, RankError):
                raise
            fault = error
        self.agree(fault, doing)

    def same(self, prepare: Callable[[], tuple[Mapping[str, Any], Any]], doing: str) -> list[Any]:
        """Raise on all ranks if one has other options than the first. Return a fact of each.

        `prepare` returns the options that have to be equal, and the fact. If it raises on one rank, all
        raise.
        """
        fault: BaseException | None = None
        mine: tuple[Mapping[str, Any], Any] = {}, None
        try:
            mine = prepare()
        except BaseException as error:
            fault = error
        gathered = self.gather((*mine, self._problem(fault, doing)), doing)
        self._raise(fault, [problem for *_, problem in gathered], doing)
        for what in mine[0]:
            self.alike(what, [other[what] for other, *_ in gathered], doing)
        return [fact for _, fact, _ in gathered]

    def first(self, prepare: Callable[[], T], doing: str) -> T:
        """Return on all ranks what `prepare` returns on the first. If it raises there, all raise."""
        found: T = self.same(lambda: ({}, prepare() if self.rank == 0 else None), doing)[0]
        return found

    def alike(self, what: str, found: list[Any], doing: str) -> None:
        """Raise if a rank has another value than rank 0. All ranks have the same list."""
        for rank, one in enumerate(found):
            if one != found[0]:
                reason = f"has another {what} than rank 0, {doing}: expected {found[0]!r}, found {one!r}"
                raise self.error(rank, reason, "ranks-differ")

    def agree(self, fault: BaseException | None, doing: str, more: bool = False) -> bool:
        """Raise on all ranks if one has a `fault`. Return whether a rank has `more` to do."""
        code = torch.tensor([2 if fault is not None else int(more)])
        self._wait(lambda: dist.all_reduce(code, dist.ReduceOp.MAX, self._cpu, async_op=True), doing)
        if int(code) < 2:
            return bool(code)
        self._raise(fault, self._objects(self._problem(fault, doing), doing), doing)
        return False

    def _problem(self, fault: BaseException | None, doing: str) -> Problem | None:
        # Without its cause, which may be a caller's own error that contains secrets.
        return None if fault is None else Problem(self.rank, doing, f"{type(fault).__name__}: {fault}")

    def _raise(self, fault: BaseException | None, problems: list[Problem | None], doing: str) -> None:
        """Raise this rank's error or, if it has none, the error of the first rank with one.

        All ranks know all errors.
        """
        if fault is not None:
            fault.add_note(f"rank {self.rank} of {self.size}, in {doing}: the other ranks were informed")
            raise fault
        for one in problems:
            if one is not None:
                raise self.error(one.rank, f"failed in {one.doing}: {one.error}", "rank-failed")

    def exchange(self, parcels: Parcels, doing: str) -> None:
        """Send each rank its bytes, and receive the bytes of each into existing memory."""
        given = parcels.received, parcels.sent, parcels.from_each, parcels.to_each

        def begin() -> Any:
            # torch's function requires an attribute that a backend itself has under another name.
            if self._apart is not None:
                return self._cpu.alltoall_base(*given)
            return dist.all_to_all_single(*given, group=self._cpu, async_op=True)

        self._wait(begin, doing)

    def error(self, rank: int, reason: str, code: str) -> RankError:
        return RankError(f"rank {rank} of {self.size} {reason}", code=code, rank=rank)

    def _wait(self, begin: Callable[[], Any], doing: str) -> None:
        """Wait for a collective. Raises if a rank can no longer take part."""
        if self._apart is not None and self._apart.gloo is None:
            raise self._lost(doing, None)
        work = None
        try:
            work = begin()
            checked = time.monotonic()
            pause = 0.0
            while not work.is_completed():
                time.sleep(pause)
                pause = min(0.002, pause + 0.0001)
                if time.monotonic() - checked > _CHECK_SECONDS:
                    if self._store.check(["lost"]):
                        break
                    checked = time.monotonic()
            else:
                work.wait()
                return
            fault: BaseException | None = None
        # Errors of gloo and NCCL, and of a store whose host is lost.
        except (RuntimeError, dist.DistError) as error:
            # The frames of the error hold the connections, and so does their pending work.
            fault = error.with_traceback(None)
        work = None
        raise self._lost(doing, fault) from fault

    def _lost(self, doing: str, fault: BaseException | None) -> RankError:
        """Return an error that names the missing rank. Living ranks record themselves in the store."""
        if self._apart is not None:
            held, self._cpu, self._apart.gloo = [self._cpu, self._apart.gloo], None, None
            _drop(held)
        try:
            self._store.set(f"here/{self.rank}", "")
            self._store.set("lost", "")
            until = time.monotonic() + _ROLL_CALL_SECONDS
            missing = [rank for rank in range(self.size) if rank != self.rank]
            while missing and time.monotonic() < until:
                time.sleep(0.05)
                missing = [rank for rank in missing if not self._store.check([f"here/{rank}"])]
        except (RuntimeError, dist.DistError):
            return self.error(0, f"hosts the store and was lost: the others wait in {doing}", "rank-lost")
        if not missing:
            return self.error(self.rank, f"lost its connections in {doing}: {fault}", "rank-lost")
        return self.error(missing[0], f"was lost or does not answer: the others wait in {doing}", "rank-lost")


def _drop(held: list[Any]) -> None:
    """Close connections that no other object uses.

    Closing waits for their pending work, and so for the other ranks to close theirs: in a thread.
    """
    # If no thread can be started, this thread waits.
    with suppress(RuntimeError):
        threading.Thread(target=held.clear, name="ingot-ranks-end").start()


def _begin(data: bytes) -> bytes:
    """Return the length of `data`, and as many of its bytes as fit into the same message."""
    return len(data).to_bytes(8, "little") + data[: _SHORT_NBYTES - 8]


def _takes_cpu(group: Any) -> bool:
    """Return whether the group sends tensors of the CPU, which NCCL alone does not."""
    return "cpu" in {device.type for device in group._device_types}


def _on_cpu(group: Any) -> Any:
    """Return a process group of the same ranks for tensors on the CPU."""
    if _takes_cpu(group):
        return group
    if group not in _ON_CPU:
        ranks = dist.get_process_group_ranks(group)
        # Other ranks need not take part, and do not.
        _ON_CPU[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _ON_CPU[group]
