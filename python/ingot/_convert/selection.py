"""The tensors of a source that the new file has, and their names there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ingot._base.checks import CONVERTED, FLOATS
from ingot._base.dtypes import PACKED
from ingot._base.keys import NamedTensors, select
from ingot._base.text import _escaped, _quoted, located
from ingot._native import TensorInfo
from ingot.errors import OptionError

from .values import elements, nbytes

if TYPE_CHECKING:
    from ingot._base.keys import Selector

    from .source import Contents, Entry

# The largest number of bytes or elements that a report shows for a tensor.
_MOST = (1 << 63) - 1
# An array has fewer bytes than this, also if another of its dimensions is 0.
_TOO_LONG = 1 << 63
# The most dimensions of a NumPy array.
_MOST_DIMENSIONS = 64


class Selected(NamedTuple):
    """The tensors under all their names, the aliases, and the names that are left out."""

    in_full: list[Entry]
    shared: dict[str, str]
    dropped: list[str]

    @property
    def entries(self) -> list[Entry]:
        """Each tensor once."""
        return [entry for entry in self.in_full if entry.name not in self.shared]


class Choice(NamedTuple):
    """The tensors that the caller chose, and their dtype and names in the new file."""

    root: str | None
    keys: Selector | None
    drop: Selector | None
    strip_prefix: str
    dtype: str | None


def selected(contents: Contents, choice: Choice) -> Selected:
    """Return the chosen tensors below `root`, each piece of memory once.

    `keys` and `drop` may also name values that are not tensors, which are left out anyway.
    """
    root, entries = choice.root, contents.entries
    below = list(entries) if root is None else _below(contents, root)
    names = list(dict.fromkeys(entry.name for entry in below))
    others = [one.name for one in contents.left_out]
    if root is not None:
        others = [name[len(root) + 1 :] for name in others if _is_under(name, root)]

    def infos() -> Iterator[TensorInfo]:
        yield from (TensorInfo(name, "", (), 0, 0, 0) for name in others)
        yield from map(_info, below)

    kept = set(select(NamedTensors(contents.path, [*names, *others], infos), choice.keys, choice.drop))
    in_full = [checked(contents, entry) for entry in below if entry.name in kept]
    seen: set[str] = set()
    for entry in in_full:
        if entry.name in seen:
            raise contents.refusal("two tensors would have this name", "duplicate-tensor", entry.name)
        seen.add(entry.name)
    if not in_full:
        some = ", ".join(f"{one.name} ({one.kind})" for one in contents.left_out[:3])
        reason = "no tensor in it is selected" + (f"; it has {_escaped(some)}" if some else "")
        raise contents.refusal(reason, "no-tensors")
    dropped = [] if root is None else [one.name for one in entries if not _is_under(one.name, root)]
    dropped += [name for name in names if name not in kept]
    in_full = [_renamed(contents, entry, choice) for entry in in_full]
    chosen = Selected(in_full, _shared(in_full), dropped)
    contents.budget.check_tensors(sum(nbytes(entry.code, entry.shape) for entry in chosen.entries))
    return chosen


def _info(entry: Entry) -> TensorInfo:
    # Files may claim shapes of more elements than 64 bits can count.
    size = min(nbytes(entry.code, entry.shape), _MOST) if entry.fault is None else 0
    return TensorInfo(entry.name, entry.code, entry.shape, 0, size, min(elements(entry.shape), _MOST))


def checked(contents: Contents, entry: Entry) -> Entry:
    """Return a chosen entry, or raise the reason why it cannot be converted."""
    if entry.fault is not None:
        raise entry.fault
    name, shape = entry.name, entry.shape
    try:
        name.encode()
    except UnicodeEncodeError:
        raise contents.refusal("the name is not valid Unicode", "invalid-unicode", name) from None
    # A tensor without elements has dimensions too, and no library makes an array of such.
    if len(shape) > _MOST_DIMENSIONS:
        reason = f"{len(shape)} dimensions: expected {_MOST_DIMENSIONS} or fewer"
        raise contents.refusal(reason, "dimensions", name, _MOST_DIMENSIONS, len(shape))
    if nbytes(entry.code, tuple(filter(None, shape))) >= _TOO_LONG:
        reason = f"shape {list(shape)} of {entry.code}: its size overflows 63 bits"
        raise contents.refusal(reason, "size-overflow", name)
    return entry


def _renamed(contents: Contents, entry: Entry, choice: Choice) -> Entry:
    prefix = choice.strip_prefix
    if not entry.name.startswith(prefix):
        reason = f"the name does not begin with {_quoted(prefix)}, which strip_prefix removes"
        facts = {"path": contents.path, "tensor": entry.name, "expected": prefix}
        raise located(OptionError, f"{reason} — keys and drop select the tensors", code="prefix", **facts)
    if choice.dtype is not None and entry.code in PACKED:
        reason = f"{entry.code} is not converted to {choice.dtype} — drop=[…] leaves it out"
        raise contents.refusal(reason, "no-conversion", entry.name, FLOATS, entry.code)
    cast = choice.dtype if choice.dtype is not None and entry.code in CONVERTED else ""
    return replace(entry, name=entry.name[len(prefix) :], cast=cast) if prefix or cast else entry


def _below(contents: Contents, root: str) -> list[Entry]:
    under = [entry for entry in contents.entries if _is_under(entry.name, root)]
    if not under:
        names = {entry.name.partition(".")[0] for entry in contents.entries}
        reason, found = f"no tensor is below {_quoted(root)}", tuple(sorted(names))[:10]
        raise contents.refusal(reason, "no-tensors", expected=root, found=found)
    return [replace(entry, name=entry.name[len(root) + 1 :]) for entry in under]


def _is_under(name: str, root: str) -> bool:
    return name.startswith((root + ".", root + "/"))


def _shared(entries: list[Entry]) -> dict[str, str]:
    """Return the aliases of each tensor, with its first name in sorted order."""
    by_memory: dict[Hashable, list[str]] = {}
    for entry in entries:
        if entry.memory is not None:
            by_memory.setdefault(entry.memory, []).append(entry.name)
    return {other: names[0] for names in map(sorted, by_memory.values()) for other in names[1:]}
