"""The tensors of a source that the new file has, and their names there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ingot._base.keys import NamedTensors, select
from ingot._base.text import _escaped, _quoted
from ingot._native import TensorInfo
from ingot.errors import OptionError

from .flatten import twice
from .limits import refused
from .values import elements, nbytes

if TYPE_CHECKING:
    from ingot._base.keys import Selector

    from .source import Contents, Entry

# Bytes and elements of a tensor that are reported at most.
_MOST = (1 << 63) - 1


class Selected(NamedTuple):
    """The tensors under all their names, those that are other names of one, and the names left out."""

    in_full: list[Entry]
    shared: dict[str, str]
    dropped: list[str]

    @property
    def entries(self) -> list[Entry]:
        """Each tensor once."""
        return [entry for entry in self.in_full if entry.name not in self.shared]


class Choice(NamedTuple):
    """The tensors that the caller chose."""

    root: str | None
    keys: Selector | None
    drop: Selector | None
    strip_prefix: str


def selected(path: str, contents: Contents, choice: Choice) -> Selected:
    """Return the chosen tensors below `root`, each piece of memory once.

    `keys` and `drop` may name what the source holds and no tensor is: it is left out anyway.
    """
    root, entries = choice.root, contents.entries
    below = list(entries) if root is None else _below(path, entries, root)
    names = list(dict.fromkeys(entry.name for entry in below))
    others = [one.name for one in contents.left_out]
    if root is not None:
        others = [name[len(root) + 1 :] for name in others if _is_under(name, root)]

    def infos() -> Iterator[TensorInfo]:
        yield from (TensorInfo(name, "", (), 0, 0, 0) for name in others)
        yield from map(_info, below)

    kept = set(select(NamedTensors(path, [*names, *others], infos), choice.keys, choice.drop))
    in_full = [entry for entry in below if entry.name in kept]
    seen: set[str] = set()
    for entry in in_full:
        if entry.fault is not None:
            raise entry.fault
        if entry.name in seen:
            raise twice(path, entry.name)
        seen.add(entry.name)
        _check_name(path, entry.name)
    dropped = [] if root is None else [one.name for one in entries if not _is_under(one.name, root)]
    dropped += [name for name in names if name not in kept]
    in_full = [_stripped(path, entry, choice.strip_prefix) for entry in in_full]
    return Selected(in_full, _shared(in_full), dropped)


def _info(entry: Entry) -> TensorInfo:
    # Files claim shapes of more elements than 64 bits can count.
    size = min(nbytes(entry.code, entry.shape), _MOST) if entry.fault is None else 0
    return TensorInfo(entry.name, entry.code, entry.shape, 0, size, min(elements(entry.shape), _MOST))


def _stripped(path: str, entry: Entry, prefix: str) -> Entry:
    if not entry.name.startswith(prefix):
        raise OptionError(
            f"{_escaped(path)}: tensor {_quoted(entry.name)}: the name does not begin with "
            f"{_quoted(prefix)}, which strip_prefix removes — keys and drop select the tensors",
            code="prefix",
            path=path,
            tensor=entry.name,
            expected=prefix,
        )
    return replace(entry, name=entry.name[len(prefix) :]) if prefix else entry


def _check_name(path: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise refused(path, "the name is not valid Unicode", code="invalid-unicode", tensor=name) from None


def _below(path: str, entries: Sequence[Entry], root: str) -> list[Entry]:
    found = [
        replace(entry, name=entry.name[len(root) + 1 :]) for entry in entries if _is_under(entry.name, root)
    ]
    if not found:
        raise refused(
            path,
            f"no tensor is below {_quoted(root)}",
            code="no-tensors",
            expected=root,
            found=tuple(sorted({entry.name.partition(".")[0] for entry in entries}))[:10],
        )
    return found


def _is_under(name: str, root: str) -> bool:
    return name.startswith((root + ".", root + "/"))


def _shared(entries: list[Entry]) -> dict[str, str]:
    """For each name of a tensor that has several, but the first of them by name, that first one."""
    by_memory: dict[Hashable, list[str]] = {}
    for entry in entries:
        if entry.memory is not None:
            by_memory.setdefault(entry.memory, []).append(entry.name)
    return {
        other: min(names) for names in by_memory.values() if len(names) > 1 for other in sorted(names)[1:]
    }
