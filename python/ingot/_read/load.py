"""Load tensors: read them, move them to their devices, and report the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, TypeVar

from ingot._base.batches import batches
from ingot._base.text import _quoted, located
from ingot._native import Checkpoint, Destinations, Gpu, Wrap
from ingot.errors import IntegrityError, SliceError

from .door import PLAIN, Reads
from .moves import (
    Carrier,
    Groups,
    Moving,
    Onto,
    Placement,
    carried,
    carrier,
    in_file,
    landing,
    moved,
    on,
    settled,
)
from .select import Selected, Wanted, is_read, wanted

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault


# The code of the dtype, a capsule or a buffer, and whether the buffer is of a tensor without dimensions.
Memory = tuple[str, Any, bool]
# Fills existing tensors of a framework.
Into = Callable[[Checkpoint, Wanted, Mapping[str, Any], Reads], None]
# `tensor[index]` by the rules of a framework.
At = Callable[[Any, Any], Any]

# Returns the bytes of a tensor, without its shape and dtype. Other bytes may follow.
RAW = Wrap.buffer(lambda shape, code, buffer, begin=0: memoryview(buffer)[begin:], str)
# The number of bytes that are compared with their digests before they move to a framework's device.
PROVEN_NBYTES = 64 << 20

if TYPE_CHECKING:
    # The tensors of a framework, if type checkers know which.
    Value = WithDefault("Value", covariant=True, default=Any)
else:
    Value = TypeVar("Value", covariant=True)


def chosen(
    checkpoint: Checkpoint,
    selected: Selected[Any] | None,
    wrap: Wrap,
    move: Moving,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """Return the selected tensors, or all, on the device of `move`."""
    if selected is None:
        return tensors(checkpoint, None, wrap, move, reads)
    names = selected.names(checkpoint)
    if selected.is_plain():
        return tensors(checkpoint, names, wrap, move, reads)
    settled(checkpoint, filterfalse((selected.out or {}).__contains__, names), move)
    if not selected.only_fills(names):
        checkpoint, reads = proven(checkpoint, names.values(), reads)
    return selected.grouped(load(checkpoint, selected, names, wrap, move, reads, at, into))


def proven(checkpoint: Checkpoint, names: Iterable[str], reads: Reads) -> tuple[Checkpoint, Reads]:
    """Return a copy of these tensors in memory, compared with their digests, and how to read from it.

    If there is nothing to compare, both are returned unchanged.
    """
    if not reads.proves():
        return checkpoint, reads
    copy = checkpoint.proven_copy(dict.fromkeys(names), *reads.proof, **reads.options())
    return copy, Reads(reads.threads)


def load(
    checkpoint: Checkpoint,
    selected: Selected[Any],
    names: Mapping[str, str],
    wrap: Wrap,
    move: Moving,
    reads: Reads,
    at: At,
    into: Into | None = None,
) -> dict[str, Any]:
    """Return the tensors of `names`, which maps to names in the file, on the device of `move`.

    Tensors with a destination in `into` are filled. `at` applies indices that files do not support (masks,
    arrays, several lists): the whole tensor is read first, as `TensorSlice` does.
    """
    # There may be many tensors, so little Python code runs for each. Destinations are in file order, in which
    # tensors are found without a search.
    out = _in_order(selected.out or {}, names)
    places = wanted(checkpoint, selected, out, names)
    for name, index in zip(out, places.indices or (), strict=False):
        if index is None and selected.of(name) is not None:
            expected = "ints, slices, None, ... and one list of ints"
            why = "is only supported by frameworks, and not together with out"
            message = f"tensor {_quoted(name)}: its index in slices {why}: expected {expected}"
            raise SliceError(message, code="index", path=checkpoint.path, tensor=name)
    fresh = list(filterfalse(out.__contains__, names)) if len(out) < len(names) else []
    others = wanted(checkpoint, selected, fresh, names)
    filling, reading = reads.shares(
        lambda: checkpoint.parts_nbytes(places), lambda: checkpoint.parts_nbytes(others)
    )
    if out and into is not None:
        # First, because it may be refused.
        into(checkpoint, places, out, filling)
    pairs = zip(fresh, others.indices or (), strict=False)
    asked = [selected.of(name) if index is None else None for name, index in pairs]
    read = dict(zip(fresh, _read(checkpoint, others, asked, wrap, move, reading, at), strict=True))
    # The first dict has the order, the others all values.
    return {**names, **read, **out} if fresh else out


def _in_order(out: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `out` in the order of `names`, which include all of its names."""
    # The order is nearly always right already, and comparing names is faster than looking them up.
    if [*out] == [*names]:
        return dict(out)
    chosen = names if len(out) == len(names) else list(filter(out.__contains__, names))
    return dict(zip(chosen, map(out.__getitem__, chosen), strict=True))


def _read(
    checkpoint: Checkpoint, wanted: Wanted, asked: list[Any], wrap: Wrap, move: Moving, reads: Reads, at: At
) -> list[Any]:
    """Return the wanted tensors on the device of `move`. The framework applies the indices in `asked`."""
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
    checkpoint: Checkpoint, names: list[str], found: list[Any], asked: list[Any], move: Moving, at: At
) -> list[Any]:
    """Apply the indices that only the framework supports, and move the tensors to their devices."""
    for rank, index in enumerate(asked):
        if index is not None:
            found[rank] = indexed(checkpoint, names[rank], found[rank], index, at)
    if move is None or isinstance(move, Gpu):
        return found
    for rank, name in enumerate(names):
        # One by one, so that each is freed before the next is moved.
        found[rank] = moved(checkpoint, name, found[rank], move)
    return found


def fill(checkpoint: Checkpoint, wanted: Wanted, destinations: Destinations, reads: Reads) -> None:
    """Read the wanted parts into the caller's memory, and compare whole tensors with their digests."""
    if not reads.proves():
        checkpoint.fill(wanted, destinations, **reads.options())
        return
    kept, sha256 = reads.proof
    try:
        if wanted.indices is None and len(set(wanted.names)) == len(wanted.names):
            checkpoint.fill(wanted, destinations, kept=kept, expected_sha256=sha256, **reads.options())
        else:
            copy, _ = proven(checkpoint, wanted.names, reads)
            copy.fill(wanted, destinations, threads=reads.threads)
    except IntegrityError as fault:
        if fault.code == "digest-mismatch":
            fault.args = (f"{fault} — the tensors that were to be filled have unspecified content",)
        raise


def tensors(
    checkpoint: Checkpoint, names: Iterable[str] | None, wrap: Wrap, move: Moving, reads: Reads = PLAIN
) -> dict[str, Any]:
    """Return the tensors of these names, or all, on the device of `move`."""
    # The usual case first: programs load thousands of small files.
    if move is None:
        return _whole(checkpoint, names, wrap, reads)
    names = settled(checkpoint, names, move)
    # The digest of a file is known once all of it has been read, and no tensor is returned before.
    groups = carried(checkpoint, names, move) if reads.proof[1] is None else {}
    if groups:
        return _carry(checkpoint, names, groups, wrap, move, reads)
    onto = landing(checkpoint, names, move)
    # A mapped tensor is read when it is moved; proven tensors are not mapped.
    is_read_later = onto is None and checkpoint.backend == "mmap" and not reads.proves()
    reading, moving = (Reads(reads.threads), reads) if is_read_later else (reads, PLAIN)
    found = _whole(checkpoint, names, wrap, reading, onto)
    if isinstance(move, Gpu):
        return found
    total = 0 if moving.tell is None else sum(checkpoint.info(name).nbytes for name in found)
    done = 0
    for name in found:
        # One by one, so that each is freed before the next is moved.
        found[name] = moved(checkpoint, name, found[name], move)
        if moving.tell is not None:
            done += checkpoint.info(name).nbytes
            moving.tell(done, total)
    return found


def _whole(
    checkpoint: Checkpoint, names: Iterable[str] | None, wrap: Wrap, reads: Reads, onto: Onto | None = None
) -> dict[str, Any]:
    """Return the tensors of these names, or all, in host memory or as `onto` has them."""
    if reads.proves():
        found = checkpoint.proven(names, wrap, *reads.proof, onto=onto, **reads.options())
    else:
        found = checkpoint.tensors(names, wrap, onto=onto, **reads.options())
    if names is None:
        _warn_of_total(checkpoint)
    return found


def _carry(
    checkpoint: Checkpoint,
    names: Iterable[str] | None,
    groups: Groups,
    wrap: Wrap,
    move: Moving,
    reads: Reads,
) -> dict[str, Any]:
    """Return the result of `tensors` if a framework reads some of them."""
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
    """Return tensors that were compared with their digests in host memory, in batches."""
    some = [*batches(names, lambda name: checkpoint.info(name).nbytes, PROVEN_NBYTES)]
    found: dict[str, Any] = {}
    shares = reads.shares(*(partial(_nbytes, checkpoint, batch) for batch in some))
    for batch, share in zip(some, shares, strict=True):
        read = checkpoint.proven(batch, wrap, *share.proof, **share.options())
        for name in batch:
            found[name] = moved(checkpoint, name, read.pop(name), by)
    return found


def _nbytes(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(checkpoint.info(name).nbytes for name in names)


def _warn_of_total(checkpoint: Checkpoint) -> None:
    """Warn if the index has another size than the tensors, which have just been read."""
    wrong = checkpoint.wrong_total()
    if wrong is not None:
        # Imported here: it is rare.
        from warnings import warn

        said, found = wrong
        words = f"the index gives total_size as {said}, but the tensors have {found} bytes"
        warn(f"{in_file(checkpoint)}{words}: the value is not used", stacklevel=4)


def tensor(checkpoint: Checkpoint, name: str, wrap: Wrap, move: Moving) -> Any:
    """Return one tensor on the device of `move`."""
    settled(checkpoint, (name,), move)
    by = carrier(checkpoint, name, move)
    if by is not None:
        return by.read(checkpoint, Wanted([name]), PLAIN)[0]
    found = checkpoint.tensor(name, wrap, onto=on(checkpoint, name, move))
    return moved(checkpoint, name, found, move)


def part(checkpoint: Checkpoint, name: str, index: Any, wrap: Wrap, move: Moving, at: At) -> Any:
    """Return the part of one tensor that `index` selects, on the device of `move`."""
    onto = None
    # The common case first: programs read a hundred thousand parts.
    if move is not None:
        settled(checkpoint, (name,), move)
        by = carrier(checkpoint, name, move)
        # As the only index, None selects all of the tensor.
        wanted = Wanted([name], [(None,) if index is None else index])
        if by is not None and is_read(checkpoint, wanted):
            return by.read(checkpoint, wanted, PLAIN)[0]
        onto = on(checkpoint, name, move)
    try:
        found = checkpoint.select(name, index, wrap, onto=onto)
    except NotImplementedError:
        found = indexed(checkpoint, name, checkpoint.tensor(name, wrap, onto=onto), index, at)
    return moved(checkpoint, name, found, move)


def indexed(checkpoint: Checkpoint, name: str, tensor: Any, index: Any, at: Callable[[Any, Any], Any]) -> Any:
    """Return ``tensor[index]`` by the framework's function `at`."""
    try:
        return at(tensor, _spelled(checkpoint, name, index))
    except (IndexError, OverflowError) as error:
        raise located(SliceError, f"{error}", code="index", path=checkpoint.path, tensor=name) from error


def _spelled(checkpoint: Checkpoint, name: str, part: Any) -> Any:
    """Check an index, and return it for a framework: that would expand a range before checking the shape."""
    if isinstance(part, range):
        shape = checkpoint.info(name).shape
        # A dimension of an empty tensor may have any size.
        longest = max(shape) if all(shape) and shape else 0
        if not all(-longest <= place < longest for place in (*part[:1], *part[-1:])):
            raise IndexError(f"{part} does not fit shape {list(shape)}")
        return list(part)
    if not isinstance(part, list | tuple) or set(map(type, part)).isdisjoint((range, list, tuple)):
        return part
    spelled = [_spelled(checkpoint, name, one) for one in part]
    if isinstance(part, tuple):
        return tuple(spelled)
    # A range in a list stands for all its positions.
    pairs = zip(part, spelled, strict=True)
    return [place for one, found in pairs for place in (found if isinstance(one, range) else (found,))]
