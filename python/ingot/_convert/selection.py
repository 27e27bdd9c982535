"""Which tensors of a source the new file gets, under which names, and which of them once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ingot._base.text import _quoted
from ingot._write.names import chosen

from .flatten import twice
from .refusal import refused

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ingot._write.names import Which

    from .source import Entry


class Selected(NamedTuple):
    """The tensors under all their names, those that are other names of one, and the names left out."""

    in_full: list[Entry]
    shared: dict[str, str]
    dropped: list[str]

    @property
    def entries(self) -> list[Entry]:
        """Each tensor once."""
        return [entry for entry in self.in_full if entry.name not in self.shared]


def selected(
    path: str, entries: Sequence[Entry], root: str | None, keep: Which | None, drop: Which | None
) -> Selected:
    """Those below `root` that `keep` and `drop` leave, each piece of memory once."""
    below = list(entries) if root is None else _below(path, entries, root)
    names = list(dict.fromkeys(entry.name for entry in below))
    kept = set(names) if keep is None else chosen(names, keep, path)
    kept -= set() if drop is None else chosen(names, drop, path)
    in_full = [entry for entry in below if entry.name in kept]
    seen: set[str] = set()
    for entry in in_full:
        if entry.fault is not None:
            raise entry.fault
        if entry.name in seen:
            raise twice(path, entry.name)
        seen.add(entry.name)
        _check_name(path, entry.name)
    dropped = [] if root is None else [one.name for one in entries if not _is_under(one, root)]
    dropped += [name for name in names if name not in kept]
    return Selected(in_full, _shared(in_full), dropped)


def _check_name(path: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise refused(path, "the name is not valid Unicode", code="invalid-unicode", tensor=name) from None


def _below(path: str, entries: Sequence[Entry], root: str) -> list[Entry]:
    found = [replace(entry, name=entry.name[len(root) + 1 :]) for entry in entries if _is_under(entry, root)]
    if not found:
        raise refused(
            path,
            f"no tensor is below {_quoted(root)}",
            code="no-tensors",
            expected=root,
            found=tuple(sorted({entry.name.partition(".")[0] for entry in entries}))[:10],
        )
    return found


def _is_under(entry: Entry, root: str) -> bool:
    return entry.name.startswith((root + ".", root + "/"))


def _shared(entries: list[Entry]) -> dict[str, str]:
    """For each name of a tensor that has several, but the first of them by name, that first one."""
    by_memory: dict[Hashable, list[str]] = {}
    for entry in entries:
        if entry.memory is not None:
            by_memory.setdefault(entry.memory, []).append(entry.name)
    return {
        other: min(names) for names in by_memory.values() if len(names) > 1 for other in sorted(names)[1:]
    }
