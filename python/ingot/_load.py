"""Tensors that are loaded: which, how much of each, as what, to where, and who is told."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import filterfalse, islice
from typing import Generic, NamedTuple, TypeVar

from ._frameworks import is_of_framework
from ._native import Gpu
from ._progress import telling
from ._text import _escaped, _quoted
from .errors import DestinationError, DtypeError, OptionError, SliceError, TensorNotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, TypeAlias, TypedDict

    from typing_extensions import TypeVar as WithDefault

    from ._native import Checkpoint, Destinations, TensorInfo, Wrap
    from ._options import Loading
    from .typing import Device, Tell

    # The code of the dtype, a capsule or a buffer, and whether the buffer is of a tensor without dimensions.
    Memory = tuple[str, Any, bool]
    # What fills tensors of a framework.
    Into = Callable[[Checkpoint, "Wanted", Mapping[str, Any], "Reads"], None]
    # `tensor[index]` by the rules of a framework.
    At = Callable[[Any, Any], Any]

    # Takes a tensor to a device, or has it read onto one.
    Move: TypeAlias = "Callable[[Any], Any] | Gpu | Carrier"
    # Where tensors are read onto: all, or each to its own or to the host.
    Onto: TypeAlias = "Gpu | list[Gpu | None]"

    class Options(TypedDict):
        """What the functions of the extension module take."""

        threads: int | None
        progress: Tell | None

    # Whether what is read is compared with the digests that its file keeps, and the SHA-256 of the file.
    Proof = tuple[bool, str | None]


# Bytes that are compared with their digests before they go to a device that a framework copies to.
PROVEN_NBYTES = 64 << 20

Tensor = TypeVar("Tensor")
if TYPE_CHECKING:
    # What a handle gives: the tensors of a framework, if checkers know which.
    Value = WithDefault("Value", covariant=True, default=Any)
else:
    Value = TypeVar("Value", covariant=True)


class Carrier:
    """Has tensors read onto a device, or spread over several, by what its framework offers.

    Called with a tensor of the host, it takes that one there.
    """

    __slots__ = ()

    def read(self, checkpoint: Checkpoint, wanted: Wanted, reads: Reads) -> list[Any]:
        """What is wanted, on the device. No more of it is in the memory of the host at a time than pieces."""
        raise NotImplementedError

    def __call__(self, tensor: Any) -> Any:
        raise NotImplementedError


class Placement:
    """A device for each tensor, by its name. `placing` makes them."""

    __slots__ = ("_choose", "_moves")

    def __init__(self, choose: Callable[[Checkpoint, str], Move | None]) -> None:
        self._choose = choose
        self._moves: dict[str, Move | None] = {}

    def of(self, checkpoint: Checkpoint, name: str) -> Move | None:
        """What takes the tensor `name` to its device; None where it may stay."""
        if name not in self._moves:
            self._moves[name] = self._choose(checkpoint, name)
        return self._moves[name]


def placing(mover: Callable[[Any], Move | None], device: Device) -> Move | Placement | None:
    """What takes tensors to `device`: to one, or to that which a dict of patterns or a callable gives each.

    Devices of frameworks may be callables too: a `torch.device` is.
    """
    if device is None or isinstance(device, str):
        return mover(device)
    if isinstance(device, Mapping):
        return Placement(_by_pattern({_pattern(given): mover(one) for given, one in device.items()}))
    if callable(device) and not is_of_framework(type(device)):
        return Placement(lambda checkpoint, name: mover(device(checkpoint.info(name))))
    return mover(device)


def _pattern(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"patterns of device must be str, found {type(given).__name__}")
    return given


def _by_pattern(moves: dict[str, Move | None]) -> Callable[[Checkpoint, str], Move | None]:
    # Imported here: few loads have patterns.
    from fnmatch import fnmatchcase

    def choose(checkpoint: Checkpoint, name: str) -> Move | None:
        for pattern, move in moves.items():
            if fnmatchcase(name, pattern):
                return move
        # A name of no tensor is the other error.
        checkpoint.info(name)
        some = ", ".join(map(_quoted, islice(moves, 3))) + (", …" if len(moves) > 3 else "")
        raise OptionError(
            f"{_where(checkpoint)}tensor {_quoted(name)}: no pattern of device fits its name: found "
            f"{some or 'none'} — a last `*` fits every name",
            code="no-device",
            path=checkpoint.path,
            tensor=name,
            expected=tuple(moves),
        )

    return choose


def settled(
    checkpoint: Checkpoint, names: Iterable[str] | None, move: Move | Placement | None
) -> Iterable[str] | None:
    """These names, or None for all, of which each has a device: it raises before any of them is read."""
    if not isinstance(move, Placement) or isinstance(names, str):
        return names
    known = checkpoint.offset_names() if names is None else list(names)
    for name in known:
        move.of(checkpoint, name)
    return None if names is None else known


def landing(
    checkpoint: Checkpoint, names: Iterable[str] | None, move: Move | Placement | None
) -> Onto | None:
    """The devices that these tensors, or all, are read onto; None where all come to the host."""
    if not isinstance(move, Placement):
        return move if isinstance(move, Gpu) else None
    known = checkpoint.offset_names() if names is None else names
    gpus = [on(checkpoint, name, move) for name in known]
    return gpus if any(gpus) else None


def on(checkpoint: Checkpoint, name: str, move: Move | Placement | None) -> Gpu | None:
    """The device that the tensor `name` is read onto; None where it comes to the host."""
    if isinstance(move, Placement):
        move = move.of(checkpoint, name)
    return move if isinstance(move, Gpu) else None


def carrier(checkpoint: Checkpoint, name: str, move: Move | Placement | None) -> Carrier | None:
    """What has the tensor `name` read by its framework; None where the extension module reads it."""
    if isinstance(move, Placement):
        move = move.of(checkpoint, name)
    return move if isinstance(move, Carrier) else None


def carried(
    checkpoint: Checkpoint, names: Iterable[str] | None, move: Move | Placement | None
) -> dict[Carrier | None, list[str]]:
    """These tensors, or all, by what has them read by its framework; nothing where all are read otherwise."""
    if not isinstance(move, (Carrier, Placement)) or isinstance(names, str):
        return {}
    groups: dict[Carrier | None, list[str]] = {}
    for name in checkpoint.offset_names() if names is None else dict.fromkeys(names):
        groups.setdefault(carrier(checkpoint, name, move), []).append(name)
    return groups if any(groups) else {}


class Reads:
    """How many threads read, and what is told ``(bytes done, bytes in all)``. None where nobody cares."""

    __slots__ = ("proof", "tell", "threads")

    def __init__(
        self, threads: int | None = None, tell: Tell | None = None, proof: Proof = (False, None)
    ) -> None:
        self.threads = threads
        self.tell = tell
        self.proof = proof

    def proves(self) -> bool:
        """Whether anything is compared."""
        return self.proof != (False, None)

    def options(self) -> Options:
        """For the functions of the extension module."""
        return {"threads": self.threads, "progress": self.tell}

    def shares(self, *nbytes: Callable[[], int]) -> list[Reads]:
        """One of these for each of several calls, which tell of all that they read together.

        `nbytes` give what each call reads, and are not called where nobody is told.
        """
        tell = self.tell
        if tell is None:
            return [self] * len(nbytes)
        sizes = [size() for size in nbytes]
        return [
            Reads(self.threads, _after(tell, sum(sizes[:rank]), sum(sizes)), self.proof)
            for rank in range(len(sizes))
        ]


def _after(tell: Tell, before: int, total: int) -> Tell:
    """What tells `tell` of a part of the work as what it is of the whole."""
    return lambda done, _: tell(before + done, total)


PLAIN = Reads()


def reading(checkpoint: Checkpoint, how: Loading) -> AbstractContextManager[tuple[Checkpoint, Reads]]:
    """Give `checkpoint` and how it is to be read, and tell of it, or show it, until it has been."""
    if how.progress is not False:
        return _told(checkpoint, how)
    # No generator, which takes as long as a fortieth of the load of a small file.
    return nullcontext((checkpoint, Reads(how.threads, None, (how.verify, how.expected_sha256))))


@contextmanager
def _told(checkpoint: Checkpoint, how: Loading) -> Iterator[tuple[Checkpoint, Reads]]:
    with telling(how.progress, "Loading", checkpoint.path or "") as tell:
        yield checkpoint, Reads(how.threads, tell, (how.verify, how.expected_sha256))


class Wanted(NamedTuple):
    """What is to be read, a column for each question: of many tensors no object is made for each."""

    # In the file.
    names: list[str]
    # Into each; None where all are wanted whole.
    indices: list[Any] | None = None
    # What to convert to, all or each; None for what is stored.
    dtypes: str | list[str] | None = None

    def some(self, ranks: list[int]) -> Wanted:
        """What is wanted of the tensors at these places."""
        names = [self.names[rank] for rank in ranks]
        indices = None if self.indices is None else [self.indices[rank] for rank in ranks]
        dtypes = [self.dtypes[rank] for rank in ranks] if isinstance(self.dtypes, list) else self.dtypes
        return Wanted(names, indices, dtypes)


class Selected(NamedTuple, Generic[Tensor]):
    """What `load_file` was asked for: which tensors, how much of each, as what and to where."""

    keys: Iterable[str] | None = None
    prefix: str | tuple[str, ...] | None = None
    where: Callable[[TensorInfo], object] | None = None
    slices: Mapping[str, Any] | None = None
    dtype: str | None = None
    out: Mapping[str, Tensor] | None = None
    # Of a tensor with several destinations: what each is called among `slices` and `out`.
    several: Mapping[str, list[str]] | None = None

    @classmethod
    def by(cls, how: Loading, out: Mapping[str, Tensor | list[Tensor]] | None) -> Selected[Any]:
        """What the options of a load say."""
        selected: Selected[Any] = cls(how.keys, how.prefix, how.where, how.slices, how.dtype)
        # Several destinations have as many slices. Looking at each of many takes time.
        if out is None or not how.slices or list not in set(map(type, out.values())):
            return selected._replace(out=out)
        slices, own, several = _apart(dict(how.slices or {}), out)
        return selected._replace(slices=slices, out=own, several=several)

    def is_everything(self) -> bool:
        """Whether it is the whole file as it is."""
        return all(option is None for option in self)

    def names(self, checkpoint: Checkpoint, others: Mapping[str, str] | None = None) -> dict[str, str]:
        """The tensors that `keys`, `prefix` and `where` all admit: in the order of `keys`, else of the file.

        Each with its name in the file. `others` are more names that tensors of the file have, with that one.
        """
        others = {} if others is None else others
        names = self._asked(checkpoint, others)
        if self.prefix is not None:
            names = self._below(checkpoint, self.prefix, names)
        if self.where is not None:
            names = [name for name in names if self.where(checkpoint.info(others.get(name, name)))]
        # There may be many of these, so that no Python code runs for each.
        found = dict(zip(names, map(others.get, names, names), strict=True))
        for name, labels in (self.several or {}).items():
            if name in found:
                found |= dict.fromkeys(labels, found.pop(name))
        for option, mapping in (("slices", self.slices), ("out", self.out)):
            self._refuse_unselected(checkpoint, option, mapping or {}, found, others)
        return found

    def grouped(self, found: dict[str, Any]) -> dict[str, Any]:
        """What was loaded by the caller's names: a list for a tensor with several destinations."""
        if self.several is None:
            return found
        lists = {name: [found.pop(label) for label in labels] for name, labels in self.several.items()}
        return found | lists

    def _asked(self, checkpoint: Checkpoint, others: Mapping[str, str]) -> list[str]:
        if self.keys is None:
            return [*checkpoint.offset_names(), *others]
        if isinstance(self.keys, str):
            # A str is an iterable of str, so it would be taken for the names of its letters.
            raise TypeError("keys must be an iterable of str, not a str")
        names = list(dict.fromkeys(self.keys))
        for name in names:
            if name not in others and name not in checkpoint:
                checkpoint.info(name)
        return names

    @staticmethod
    def _below(checkpoint: Checkpoint, prefix: str | tuple[str, ...], names: list[str]) -> list[str]:
        prefixes = prefix if isinstance(prefix, tuple) else (prefix,)
        for one in prefixes:
            if not isinstance(one, str):
                raise TypeError(f"prefix must be a str or a tuple of str, found {type(one).__name__}")
        found = [name for name in names if name.startswith(prefixes)]
        if names and prefixes and not found:
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            some = ", ".join(map(_quoted, islice(tops, 3))) + (", …" if len(tops) > 3 else "")
            where = "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "
            raise TensorNotFoundError(
                f"{where}no tensor has a name that begins with {' or '.join(map(_quoted, prefixes))}: "
                f"names begin with {some}",
                code="unknown-prefix",
                path=checkpoint.path,
                expected=tuple(tops),
                found=prefix,
            )
        return found

    def _refuse_unselected(
        self,
        checkpoint: Checkpoint,
        option: str,
        mapping: Mapping[str, Any],
        names: Container[str],
        others: Container[str],
    ) -> None:
        given = {label: name for name, labels in (self.several or {}).items() for label in labels}
        for label in filterfalse(names.__contains__, mapping):
            name = given.get(label, label)
            if name not in others:
                # Says so where there is no such tensor at all.
                checkpoint.info(name)
            raise OptionError(
                f"{option} has tensor {_quoted(name)}, which keys, prefix and where leave out",
                code="not-selected",
                path=checkpoint.path,
                tensor=name,
            )

    def of(self, name: str) -> Any:
        """The index into the tensor `name`; None for all of it."""
        if self.slices is None or name not in self.slices:
            return None
        index = self.slices[name]
        # One that adds a dimension, as `(None,)` does and as it means the same between brackets.
        return (None,) if index is None else index

    def is_plain(self) -> bool:
        """Whether tensors come whole and as they are."""
        return self.slices is None and self.dtype is None and self.out is None


def _apart(
    slices: dict[str, Any], out: Mapping[str, Tensor | list[Tensor]]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[str]]]:
    """`slices` and `out` with a name for each of several destinations, and these names."""
    own: dict[str, Any] = {}
    several: dict[str, list[str]] = {}
    for name, given in out.items():
        if not isinstance(given, list):
            own[name] = given
            continue
        indices = slices.pop(name, None)
        if not isinstance(indices, list) or len(indices) != len(given):
            found = f"a list of {len(indices)}" if isinstance(indices, list) else type(indices).__name__
            raise OptionError(
                f"tensor {_quoted(name)}: out has a list of {len(given)} destinations, so slices needs a "
                f"list of as many indices: found {found}",
                code="slices-and-out",
                tensor=name,
                expected=len(given),
                found=indices,
            )
        several[name] = [f"{name}{[number]}" for number in range(len(given))]
        if taken := next(filter(out.__contains__, several[name]), None):
            raise OptionError(
                f"tensor {_quoted(taken)}: out has this name, and a list for {_quoted(name)}, whose "
                "destinations are called so: load one of the two apart",
                code="slices-and-out",
                tensor=taken,
            )
        own |= zip(several[name], given, strict=True)
        slices |= zip(several[name], indices, strict=True)
    return slices, own, several


def chosen(
    checkpoint: Checkpoint,
    selected: Selected[Any],
    wrap: Wrap,
    move: Move | Placement | None,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """The tensors that were asked for, on the device that `move` takes them to."""
    if selected.is_everything():
        return tensors(checkpoint, None, wrap, move, reads)
    names = selected.names(checkpoint)
    if selected.is_plain():
        return tensors(checkpoint, names, wrap, move, reads)
    settled(checkpoint, filterfalse((selected.out or {}).__contains__, names), move)
    refuse_unproven(checkpoint, reads)
    return selected.grouped(load(checkpoint, selected, names, wrap, move, reads, at, into))


def refuse_unproven(checkpoint: Checkpoint, reads: Reads) -> None:
    """Raise `OptionError` if tensors shall be compared that do not come whole and as they are."""
    if reads.proves():
        option = "verify" if reads.proof[0] else "expected_sha256"
        raise OptionError(
            f"{option} is for whole tensors as they are: it goes with keys, prefix and where, not with "
            "slices, dtype or out — call ingot.verify first",
            code="not-provable",
            path=checkpoint.path,
        )


def load(
    checkpoint: Checkpoint,
    selected: Selected[Any],
    names: Mapping[str, str],
    wrap: Wrap,
    move: Move | Placement | None,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """The tensors of `names`, each with its name in the file, on the device that `move` takes it to.

    `into` fills those that have a place. `at` is for the indices that files are not read by: masks, arrays,
    several lists. Then the whole tensor is read, as `TensorSlice` does.
    """
    out = selected.out or {}
    # There may be many of them, so that no Python code runs for each where it need not.
    places = wanted(checkpoint, selected, out, names)
    for name, index in zip(out, places.indices or (), strict=False):
        if index is None and selected.of(name) is not None:
            raise SliceError(
                f"tensor {_quoted(name)}: its index in slices is one that only frameworks know, which goes "
                "without a place in out: expected ints, slices, None, ... and one list of ints",
                code="index",
                path=checkpoint.path,
                tensor=name,
            )
    fresh = list(filterfalse(out.__contains__, names)) if len(out) < len(names) else []
    others = wanted(checkpoint, selected, fresh, names)
    filling, reading = reads.shares(
        lambda: checkpoint.parts_nbytes(places), lambda: checkpoint.parts_nbytes(others)
    )
    if out and into is not None:
        # First, because it may be refused.
        into(checkpoint, places, out, filling)
    asked = [
        selected.of(name) if index is None else None
        for name, index in zip(fresh, others.indices or (), strict=False)
    ]
    read = dict(zip(fresh, _read(checkpoint, others, asked, wrap, move, reading, at), strict=True))
    # The first gives the order, the others all values.
    return {**names, **read, **out}


def _read(
    checkpoint: Checkpoint,
    wanted: Wanted,
    asked: list[Any],
    wrap: Wrap,
    move: Move | Placement | None,
    reads: Reads,
    at: At,
) -> list[Any]:
    """What is wanted, where `move` takes it. `asked` has the indices that are left to the framework."""
    groups: dict[Carrier | None, list[int]] = {}
    if isinstance(move, (Carrier, Placement)):
        for rank, name in enumerate(wanted.names):
            is_left = bool(asked) and asked[rank] is not None
            groups.setdefault(None if is_left else carrier(checkpoint, name, move), []).append(rank)
    if not any(groups):
        onto = landing(checkpoint, wanted.names, move)
        found = checkpoint.parts(wanted, wrap, onto=onto, **reads.options())
        return _finished(checkpoint, wanted.names, found, asked, move, at)
    by_rank: dict[int, Any] = {}
    parts = [wanted.some(ranks) for ranks in groups.values()]
    shares = reads.shares(*(partial(checkpoint.parts_nbytes, part) for part in parts))
    for (by, ranks), part, share in zip(groups.items(), parts, shares, strict=True):
        if by is not None:
            found = by.read(checkpoint, part, share)
        else:
            onto = landing(checkpoint, part.names, move)
            found = checkpoint.parts(part, wrap, onto=onto, **share.options())
            left = [asked[rank] for rank in ranks] if asked else []
            found = _finished(checkpoint, part.names, found, left, move, at)
        by_rank.update(zip(ranks, found, strict=True))
    return [by_rank[rank] for rank in range(len(wanted.names))]


def _finished(
    checkpoint: Checkpoint,
    names: list[str],
    found: list[Any],
    asked: list[Any],
    move: Move | Placement | None,
    at: At,
) -> list[Any]:
    """What was read, with the indices that are left to the framework, and where `move` takes it."""
    for rank, index in enumerate(asked):
        if index is not None:
            found[rank] = indexed(checkpoint, names[rank], found[rank], index, at)
    if move is None or isinstance(move, Gpu):
        return found
    for rank, name in enumerate(names):
        # One by one, so that what has been moved is freed before the next is.
        found[rank] = moved(checkpoint, name, found[rank], move)
    return found


def wanted(
    checkpoint: Checkpoint, selected: Selected[Any], some: Iterable[str], names: Mapping[str, str]
) -> Wanted:
    """What is to be read of `some` tensors of `names`, each of which has its name in the file.

    All of those that have an index which files are not read by.
    """
    whole = Wanted(list(map(names.__getitem__, some)), None, selected.dtype)
    if selected.slices is None:
        return whole
    indices = list(map(selected.of, some))
    distinct = {id(index): index for index in indices}
    found = whole._replace(indices=indices)
    if all(map(_is_basic, distinct.values())) or _is_read(checkpoint, found):
        return found
    each = zip(whole.names, indices, strict=True)
    read = [_is_read(checkpoint, Wanted([name], [index], selected.dtype)) for name, index in each]
    return whole._replace(
        indices=[index if is_read else None for index, is_read in zip(indices, read, strict=True)]
    )


def _is_basic(index: Any) -> bool:
    """Whether it is made of what every file is read by, as nearly all are."""
    parts = index if type(index) is tuple else (index,)
    return set(map(type, parts)) <= {int, slice, type(None), type(...)}


def _is_read(checkpoint: Checkpoint, wanted: Wanted) -> bool:
    """Whether files are read by all of these indices."""
    try:
        checkpoint.parts_nbytes(wanted)
    except NotImplementedError:
        return False
    return True


def fill(
    checkpoint: Checkpoint,
    wanted: Wanted,
    destinations: Destinations,
    reads: Reads,
) -> None:
    """Read what is wanted into memory of others."""
    checkpoint.fill(wanted, destinations, **reads.options())


def misfit(name: str, reason: str, code: str = "destination") -> DestinationError:
    """The refusal to read the tensor `name` into memory of the caller."""
    return DestinationError(f"tensor {_quoted(name)}: {reason}", code=code, tensor=name)


def tensors(
    checkpoint: Checkpoint,
    names: Iterable[str] | None,
    wrap: Wrap,
    move: Move | Placement | None,
    reads: Reads = PLAIN,
) -> dict[str, Any]:
    """The tensors of these names, or all, on the device that `move` takes them to."""
    names = settled(checkpoint, names, move)
    # The digest of a file is known when all of it has been read, and nothing is handed out before.
    groups = carried(checkpoint, names, move) if reads.proof[1] is None else {}
    if groups:
        return _carry(checkpoint, names, groups, wrap, move, reads)
    onto = landing(checkpoint, names, move)
    # What is mapped is read when it is moved; what is proven is not mapped.
    is_moved = move is not None and onto is None
    is_read_later = is_moved and checkpoint.backend == "mmap" and not reads.proves()
    reading, moving = (Reads(reads.threads), reads) if is_read_later else (reads, PLAIN)
    if reading.proves():
        found = checkpoint.proven(names, wrap, *reading.proof, onto=onto, **reading.options())
    else:
        found = checkpoint.tensors(names, wrap, onto=onto, **reading.options())
    if names is None:
        _warn_of_total(checkpoint)
    if move is None or isinstance(move, Gpu):
        return found
    total = 0 if moving.tell is None else sum(checkpoint.info(name).nbytes for name in found)
    done = 0
    for name in found:
        # One by one, so that what has been moved is freed before the next is.
        found[name] = moved(checkpoint, name, found[name], move)
        if moving.tell is not None:
            done += checkpoint.info(name).nbytes
            moving.tell(done, total)
    return found


def _carry(
    checkpoint: Checkpoint,
    names: Iterable[str] | None,
    groups: dict[Carrier | None, list[str]],
    wrap: Wrap,
    move: Move | Placement | None,
    reads: Reads,
) -> dict[str, Any]:
    """What `tensors` gives, where a framework has some of them read."""
    found: dict[str, Any] = {}
    shares = reads.shares(*(partial(_nbytes, checkpoint, some) for some in groups.values()))
    for (by, some), share in zip(groups.items(), shares, strict=True):
        if by is None:
            found |= tensors(checkpoint, some, wrap, move, share)
        elif share.proves():
            found |= _proven(checkpoint, some, wrap, by, share)
        else:
            found |= zip(some, by.read(checkpoint, Wanted(some), share), strict=True)
    if names is None:
        _warn_of_total(checkpoint)
    return {name: found[name] for name in (checkpoint.offset_names() if names is None else names)}


def _proven(
    checkpoint: Checkpoint, names: list[str], wrap: Wrap, by: Carrier, reads: Reads
) -> dict[str, Any]:
    """Tensors that are compared with their digests in the memory of the host, some at a time."""
    batches: list[list[str]] = []
    filled = 0
    for name in names:
        nbytes = checkpoint.info(name).nbytes
        if not batches or filled + nbytes > PROVEN_NBYTES:
            batches.append([])
            filled = 0
        batches[-1].append(name)
        filled += nbytes
    found: dict[str, Any] = {}
    shares = reads.shares(*(partial(_nbytes, checkpoint, batch) for batch in batches))
    for batch, share in zip(batches, shares, strict=True):
        some = checkpoint.proven(batch, wrap, *share.proof, **share.options())
        for name in batch:
            found[name] = moved(checkpoint, name, some.pop(name), by)
    return found


def _nbytes(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(checkpoint.info(name).nbytes for name in names)


def _warn_of_total(checkpoint: Checkpoint) -> None:
    """Tell whoever has just read everything that the index gives another size."""
    wrong = checkpoint.wrong_total()
    if wrong is not None:
        # Imported here: it is rare.
        from warnings import warn

        said, found = wrong
        warn(
            f"{_where(checkpoint)}the index gives total_size as {said}, and the tensors take {found} bytes: "
            "nothing depends on it",
            stacklevel=4,
        )


def tensor(checkpoint: Checkpoint, name: str, wrap: Wrap, move: Move | Placement) -> Any:
    """One tensor, on the device that `move` takes it to."""
    settled(checkpoint, (name,), move)
    by = carrier(checkpoint, name, move)
    if by is not None:
        return by.read(checkpoint, Wanted([name]), PLAIN)[0]
    found = checkpoint.tensor(name, wrap, onto=on(checkpoint, name, move))
    return moved(checkpoint, name, found, move)


def part(
    checkpoint: Checkpoint, name: str, index: Any, wrap: Wrap, move: Move | Placement | None, at: At
) -> Any:
    """What `index` takes of one tensor, on the device that `move` takes it to."""
    settled(checkpoint, (name,), move)
    by = carrier(checkpoint, name, move)
    onto = on(checkpoint, name, move)
    # As the index of one of many None means all of the tensor.
    wanted = Wanted([name], [(None,) if index is None else index])
    if by is not None and _is_read(checkpoint, wanted):
        return by.read(checkpoint, wanted, PLAIN)[0]
    try:
        found = checkpoint.select(name, index, wrap, onto=onto)
    except NotImplementedError:
        found = indexed(checkpoint, name, checkpoint.tensor(name, wrap, onto=onto), index, at)
    return moved(checkpoint, name, found, move)


def no_destination(name: str, expected: str, found: object) -> TypeError:
    """What is raised where `out` has another object than a tensor."""
    hint = ": several destinations need a list of as many indices in slices" if type(found) is list else ""
    return TypeError(f"tensor {_quoted(name)}: expected a {expected}, found {type(found).__name__}{hint}")


def moved(checkpoint: Checkpoint, name: str, tensor: Any, move: Move | Placement | None) -> Any:
    """`tensor` on the device that `move` takes it to, unless it was read onto it."""
    # The usual answer first: programs ask for a hundred thousand tensors.
    if move is None or isinstance(move, Gpu):
        return tensor
    if isinstance(move, Placement):
        return moved(checkpoint, name, tensor, move.of(checkpoint, name))
    try:
        return move(tensor)
    except DtypeError as error:
        raise about(checkpoint, name, error) from error.__cause__


def about(checkpoint: Checkpoint, name: str, error: DtypeError) -> DtypeError:
    """What a framework says of a dtype, about a tensor of a file."""
    return DtypeError(
        f"{_where(checkpoint)}tensor {_quoted(name)}: {error}",
        code=error.code,
        path=checkpoint.path,
        tensor=name,
        found=checkpoint.info(name).dtype if error.found is None else error.found,
    )


def indexed(checkpoint: Checkpoint, name: str, tensor: Any, index: Any, at: Callable[[Any, Any], Any]) -> Any:
    """`tensor[index]` as the framework's `at` has it."""
    try:
        return at(tensor, index)
    except IndexError as error:
        raise SliceError(
            f"{_where(checkpoint)}tensor {_quoted(name)}: {error}",
            code="index",
            path=checkpoint.path,
            tensor=name,
        ) from error


def _where(checkpoint: Checkpoint) -> str:
    """What messages about a file begin with."""
    return "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "
