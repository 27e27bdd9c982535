"""Make HTML for notebooks: a headline, facts, and rows in a table or in a folded tree.

It is HTML without scripts and without styles of its own. Every text in it is escaped: names come from files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, islice
from typing import NamedTuple

from .text import _escaped

# The most rows that a browser folds and unfolds at once.
MOST_ROWS = 500
_LONGEST_TEXT = 400
# The deepest level of modules; the dots in the rest of a path are part of the name. This limits the
# recursion.
_DEEPEST = 16


def page(title: str, facts: Iterable[object], *parts: str) -> str:
    """Return the headline, the facts in a line below it, and the result of `table` or `tree`."""
    line = " · ".join(map(_shown, facts))
    return f"<div><b>{_shown(title)}</b><div>{line}</div>{''.join(parts)}</div>"


def table(rows: Iterable[Sequence[object]]) -> str:
    """Return a table of the first rows, and the number of the others."""
    lines = list(rows)
    return _table(lines[:MOST_ROWS]) + _more(len(lines) - MOST_ROWS)


def tree(rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    """Return names with their columns, by the path of the module before the last dot of a name.

    If there are too many rows, modules near the root come first, so that each of them has a line.
    """
    root = _Module()
    for name, columns in rows:
        root.add(name, columns)
    _choose(root, MOST_ROWS)
    return _rendered(root)


class _Line(NamedTuple):
    """A tensor with its columns, or a module with its children."""

    label: str
    columns: Sequence[object]
    below: _Module | None

    @property
    def tensors(self) -> int:
        return 1 if self.below is None else self.below.tensors


class _Module:
    """The tensors and modules below one path."""

    __slots__ = ("chosen", "modules", "own", "tensors")

    def __init__(self) -> None:
        self.own: dict[str, Sequence[object]] = {}
        self.modules: dict[str, _Module] = {}
        # The tensors below it, and the lines to show.
        self.tensors = 0
        self.chosen: list[_Line] = []

    def add(self, name: str, columns: Sequence[object]) -> None:
        *path, last = name.split(".", _DEEPEST)
        module = self
        module.tensors += 1
        for part in path:
            module = module.modules.setdefault(part, _Module())
            module.tensors += 1
        module.own[last] = columns

    def lines(self) -> Iterator[_Line]:
        for label, columns in self.own.items():
            yield _Line(label, columns, None)
        for label, module in self.modules.items():
            # A module with nothing but one module in it needs no line of its own.
            while not module.own and len(module.modules) == 1:
                ((part, module),) = module.modules.items()
                label = f"{label}.{part}"
            yield _Line(label, (), module)


def _choose(root: _Module, most: int) -> None:
    """Choose the lines to show, those near the root first."""
    waiting = deque([root])
    while waiting and most:
        module = waiting.popleft()
        module.chosen = list(islice(module.lines(), most))
        most -= len(module.chosen)
        waiting.extend(line.below for line in module.chosen if line.below is not None)


def _rendered(module: _Module) -> str:
    parts: list[str] = []
    for is_module, lines in groupby(module.chosen, lambda line: line.below is not None):
        if is_module:
            parts += map(_folded, lines)
        else:
            parts.append(_table((line.label, *line.columns) for line in lines))
    return "".join(parts) + _more(module.tensors - sum(line.tensors for line in module.chosen))


def _folded(line: _Line) -> str:
    inner = "" if line.below is None else _rendered(line.below)
    summary = f"{_shown(line.label)} <small>({line.tensors:,})</small>"
    return f"<details><summary>{summary}</summary><blockquote>{inner}</blockquote></details>"


def _table(rows: Iterable[Sequence[object]]) -> str:
    cells = ("".join(f"<td>{_shown(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table>{lines}</table>" if lines else ""


def _more(count: int) -> str:
    return f"<div>… and {count:,} more</div>" if count > 0 else ""


def _shown(value: object) -> str:
    """Return `value` as HTML text, with markup and control characters escaped."""
    text = str(value)
    return escape(_escaped(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"))
