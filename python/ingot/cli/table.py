"""Lay out tables for terminals: no line is wider than the terminal, and cells that differ look different.

Columns with text are narrowed first, and their cells cut. If cells that differ look alike at that width,
columns are left out. As the last resort, the widest text has a line of its own above its row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ingot._base.text import _Escapes

_ESCAPES = _Escapes()


def shown(text: str) -> str:
    """Return `text` with control characters and invisible characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_ESCAPES)


# An emoji of several characters, which are joined by invisible ones.
_PICTURE = "[\u2190-\u2bff\U0001f000-\U0001faff][\ufe0f\U0001f3fb-\U0001f3ff]?"
_EMOJI = re.compile(f"({_PICTURE}(?:\u200d{_PICTURE})*)")


def piped(text: str) -> str:
    """Return `text` for a pipe: escaped, with emoji as they are.

    Terminals differ in the width of joined emoji, which would break the columns of a table.
    """
    if text.isascii():
        return shown(text)
    return "".join(part if at % 2 else shown(part) for at, part in enumerate(_EMOJI.split(text)))


# The least width of a column, and the least one as long as spare columns can be left out instead.
_NARROWEST = 12
_READABLE = 20
# Blanks between columns, and before a row whose text is on a line above.
_GAP = 2
_INDENT = 2


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False
    """Whether the column has numbers, which are right-aligned and never cut."""
    whole: bool = False
    """Whether the cells are never cut, because people copy them. A line that becomes too long wraps."""
    spare: bool = False
    """Whether the column is among the first to be left out if the terminal is too narrow."""
    named: bool = False
    """Whether the cells are names of files, which are cut last: after all other cells and spare columns."""
    wraps: bool = False
    """Whether the cells are sentences, which continue on the next line instead of being cut."""

    @property
    def is_cut(self) -> bool:
        """Whether long cells are cut."""
        return not (self.right or self.whole or self.wraps)


def aligned(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int, strong: Callable[[str], str]
) -> Iterator[str]:
    """Yield the lines of a table with titles that fits into `width` columns of a terminal."""
    table = _Table(columns, [[shown(cell) for cell in row] for row in rows])
    found = table.layout(width)
    yield from (strong(columns[at].title) for at in found.above)
    indent = " " * _INDENT * bool(found.above)
    titles = [cut(columns[at].title, size) for at, size in found.widths.items()]
    kept, widths = [columns[at] for at in found.widths], [*found.widths.values()]
    yield strong(indent + _line(titles, kept, widths))
    for row in table.cells:
        for at in found.above:
            yield from wrapped(row[at], width)
        for cells in zip_longest(
            *(table.lines(at, row[at], size) for at, size in found.widths.items()), fillvalue=""
        ):
            yield indent + _line(cells, kept, widths)
    if found.left_out:
        names = ", ".join(columns[at].title for at in found.left_out)
        yield from wrapped(f"left out: {names}; widen the terminal, or use --json", width)


def boxed(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int, strong: Callable[[str], str]
) -> Iterator[str]:
    """Yield the lines of a table in a box with round corners, or without a box if it does not fit."""
    rows = [*rows]
    table = _Table(columns, [[shown(cell) for cell in row] for row in rows], gap=3)
    # A border and a blank at each end of each line.
    found = table.layout(width - 4)
    if found.above or found.left_out:
        yield from aligned(columns, rows, width, strong)
        return
    widths = [*found.widths.values()]
    rules = ["─" * (one + 2) for one in widths]
    yield f"╭{'┬'.join(rules)}╮"
    yield _boxed(
        [cut(column.title, size) for column, size in zip(columns, widths, strict=True)], widths, strong
    )
    yield f"├{'┼'.join(rules)}┤"
    for row in table.cells:
        cells = (table.lines(at, row[at], size) for at, size in found.widths.items())
        yield from (_boxed(line, widths, str) for line in zip_longest(*cells, fillvalue=""))
    yield f"╰{'┴'.join(rules)}╯"


def _boxed(cells: Sequence[str], widths: Sequence[int], style: Callable[[str], str]) -> str:
    padded = [text + " " * (width - cell_width(text)) for text, width in zip(cells, widths, strict=True)]
    return f"│ {' │ '.join(map(style, padded))} │"


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for text, column, width in zip(cells, columns, widths, strict=True):
        gap = " " * (width - cell_width(text))
        padded.append(gap + text if column.right else text + gap)
    return (" " * _GAP).join(padded).rstrip()


class _Layout(NamedTuple):
    """The columns of each row and their widths, the columns above each row, and those that are left out."""

    widths: dict[int, int]
    above: list[int]
    left_out: list[int]


class _Table:
    """The cells of a table, and the widths that their columns need."""

    def __init__(self, columns: Sequence[Column], cells: list[list[str]], gap: int = _GAP) -> None:
        self.columns = columns
        self.cells = cells
        self._gap = gap
        empty: Sequence[Sequence[str]] = [()] * len(columns)
        self._texts = [[*dict.fromkeys(texts)] for texts in (zip(*cells, strict=True) if cells else empty)]
        self._natural = [
            max(map(cell_width, (column.title, *texts)))
            for column, texts in zip(columns, self._texts, strict=True)
        ]
        # The least widths, which grow if cells look alike.
        self._least = [
            min(natural, _NARROWEST) if column.is_cut or column.wraps else natural
            for column, natural in zip(columns, self._natural, strict=True)
        ]
        self._cuts: dict[tuple[int, int], Mapping[str, str]] = {}

    def lines(self, at: int, cell: str, width: int) -> Sequence[str]:
        """Return the lines of a cell in a column of `width`."""
        if width >= self._natural[at] or not self.columns[at].is_cut:
            return wrapped(cell, width) if self.columns[at].wraps else (cell,)
        return (self._cut(at, width)[cell],)

    def layout(self, width: int) -> _Layout:
        """Return the layout that fits into `width`, the one that leaves out least."""
        every = [*range(len(self.columns))]
        above: list[int] = []
        while True:
            room = width - _INDENT * bool(above)
            beside = [at for at in every if at not in above]
            widths = self._without_spare(beside, room)
            # A short text is not worth a line.
            long = [at for at in beside if self.columns[at].is_cut and self._natural[at] >= _NARROWEST]
            if widths is None and long and len(beside) > 1:
                above = sorted([*above, max(long, key=lambda at: self._least[at])])
                continue
            widths = widths or self._first(beside, room)
            return _Layout(widths, above, [at for at in beside if at not in widths])

    def _without_spare(self, beside: Sequence[int], room: int) -> dict[int, int] | None:
        """Return the widths of the columns, without as many spare ones as needed."""
        kept = [*beside]
        while True:
            spare = [at for at in kept if self.columns[at].spare]
            widths = self._narrowed(kept, room, has_spare=bool(spare))
            if widths or not spare or len(kept) == 1:
                return widths
            kept.remove(spare[-1])

    def _first(self, beside: Sequence[int], room: int) -> dict[int, int]:
        """Return the widths of the first columns that fit, or of the columns that are never cut."""
        kept = [at for at in beside if not self.columns[at].spare] or [*beside[:1]]
        while True:
            widths = self._narrowed(kept, room)
            others = [at for at in kept if not self.columns[at].whole]
            if widths or not others or len(kept) == 1:
                return widths or {at: self._least[at] for at in kept}
            kept.remove(others[-1])

    def _narrowed(self, kept: Sequence[int], room: int, has_spare: bool = False) -> dict[int, int] | None:
        """Return the widths of columns narrowed until they fit and their cells differ, or None."""
        text = [at for at in kept if self.columns[at].is_cut or self.columns[at].wraps]
        named = [at for at in text if self.columns[at].named]
        readable = _READABLE if has_spare else 0
        while True:
            widths = {at: self._natural[at] for at in kept}
            self._narrow(widths, [at for at in text if at not in named], room, readable)
            self._narrow(widths, [] if has_spare else named, room, readable)
            if self._over(widths, room) > 0:
                return None
            alike = [at for at in text if not self._differ(at, widths[at])]
            if not alike:
                return widths
            for at in alike:
                self._least[at] = self._least_above(at, widths[at])

    def _over(self, widths: Mapping[int, int], room: int) -> int:
        """Return by how many columns of the terminal a table is wider than `room`."""
        return sum(widths.values()) + self._gap * (len(widths) - 1) - room

    def _narrow(self, widths: dict[int, int], text: Sequence[int], room: int, readable: int) -> None:
        """Narrow the widest of the columns at `text` until the table fits into `room`."""
        least = {at: max(self._least[at], min(self._natural[at], readable)) for at in text}
        while (over := self._over(widths, room)) > 0:
            able = [at for at in text if widths[at] > least[at]]
            if not able:
                return
            most = max(widths[at] for at in able)
            widest = [at for at in able if widths[at] == most]
            stops = [widths[at] for at in able if widths[at] < most] + [least[at] for at in widest]
            # Columns of one width are narrowed alike.
            taken = min(-(-over // len(widest)), most - max(stops))
            for at in widest:
                widths[at] -= taken

    def _differ(self, at: int, width: int) -> bool:
        """Return whether cells that differ still do in a column of `width`."""
        if width >= self._natural[at] or self.columns[at].wraps:
            return True
        return all(cell_width(short) <= width for short in self._cut(at, width).values())

    def _cut(self, at: int, width: int) -> Mapping[str, str]:
        found = self._cuts.get((at, width))
        if found is None:
            found = self._cuts[at, width] = distinct_cuts(self._texts[at], width)
        return found

    def _least_above(self, at: int, width: int) -> int:
        """Return the least width above `width` at which the cells differ."""
        low, high = width, self._natural[at]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._differ(at, middle) else (middle, high)
        return high


def wrapped(text: str, width: int) -> list[str]:
    """Break `text` into lines of `width` columns, at blanks if possible, else at dots and the like."""
    lines = []
    while cell_width(text) > width:
        head = cut_to(text, width) or text[:1]
        blank = (head + text[len(head) : len(head) + 1]).rfind(" ")
        if blank > 0 and text[:blank].strip():
            lines.append(text[:blank].rstrip())
            text = text[blank:].lstrip()
        else:
            sign = max(map(head.rfind, "._/-")) + 1
            at = sign if 2 * sign > len(head) else len(head)
            lines.append(text[:at])
            text = text[at:]
    return [*lines, text] if text or not lines else lines


def cut(text: str, width: int) -> str:
    """Cut `text` to `width` columns. Removes the middle, since names differ at both ends."""
    if cell_width(text) <= width:
        return text
    head, tail = width // 2, width - width // 2 - 1
    while cell_width(text[:head]) > width // 2:
        head -= 1
    while tail and cell_width(text[-tail:]) > width - width // 2 - 1:
        tail -= 1
    return text[:head] + "…" + (text[-tail:] if tail else "")


# The least width to cut to.
_LEAST_CUT = 3


def distinct_cuts(texts: Iterable[str], width: int) -> dict[str, str]:
    """Return each text cut to `width` columns, or whole where every cut would look like another text."""
    distinct = [*dict.fromkeys(texts)]
    if all(cell_width(text) <= width for text in distinct):
        return dict(zip(distinct, distinct, strict=True))
    # Words that all texts have, such as a folder and an ending, are cut first.
    ends = _common_ends(distinct, whole_words=True)
    found = _distinct_middles(distinct, width, set(), ends) if len(distinct) > 1 and any(ends) else {}
    if found:
        return found
    cuts = {text: cut(text, width) for text in distinct}
    alike: dict[str, list[str]] = {}
    for text, short in cuts.items():
        alike.setdefault(short, []).append(text)
    taken = {short for short, group in alike.items() if len(group) == 1}
    for group in alike.values():
        if len(group) > 1:
            found = _without_common_words(group, width, taken)
            found = (
                found
                or _distinct_middles(group, width, taken, _common_ends(group))
                or {text: text for text in group}
            )
            taken.update(found.values())
            cuts |= found
    return cuts


def _distinct_middles(texts: list[str], width: int, taken: set[str], ends: tuple[int, int]) -> dict[str, str]:
    """Return cuts without the ends that all texts have in common, or nothing if that is too long."""
    begin, end = ends
    middles = {text: text[begin : len(text) - end] for text in texts}
    for room in range(width - 2, max(width - 6, _LEAST_CUT), -1):
        cuts = distinct_cuts(middles.values(), room)
        found = {text: _around(text, cuts[middle], begin, end, width) for text, middle in middles.items()}
        fits = all(cell_width(one) <= width for one in found.values())
        if fits and len({*found.values()} - taken) == len(texts):
            return found
    return {}


# A shorter rest of a beginning says nothing.
_LEAST_HEAD = 4


def _around(text: str, middle: str, begin: int, end: int, width: int) -> str:
    """Return the middle of a text between as much of its beginning as fits, and its whole end if it fits."""
    head, tail = text[:begin], text[len(text) - end :]
    room = width - cell_width(middle)
    if cell_width(head) + cell_width(tail) > room:
        tail = "…" * bool(tail)
        room -= len(tail)
    if cell_width(head) > room:
        head = cut_to(head, max(0, room - 1))
        head = f"{head if len(head) >= _LEAST_HEAD else ''}…"
    return f"{head}{middle}{tail}".replace("……", "…")


def cut_to(text: str, width: int) -> str:
    """Return the start of a text that fits into `width` columns."""
    while cell_width(text) > width:
        text = text[: max(0, min(len(text) - 1, width))]
    return text


# A name without words needs some room to be read.
_LEAST_OF_WORDS = 24
_WORD = re.compile(r"[^\W_]+[\W_]?|[\W_]")


def _without_common_words(texts: list[str], width: int, taken: set[str]) -> dict[str, str]:
    """Return cuts without the words that most of the texts have, or nothing if these look alike."""
    if width < _LEAST_OF_WORDS:
        return {}
    words = {text: _WORD.findall(text) for text in texts}
    number = Counter(word for found in words.values() for word in {*found})
    cuts = {text: _shortened(found, width, number) for text, found in words.items()}
    fits = all(cell_width(short) <= width for short in cuts.values())
    return cuts if fits and len({*cuts.values()} - taken) == len(texts) else {}


def _shortened(words: list[str], width: int, number: Counter[str]) -> str:
    """Return a text without its most common words, of these the longest first."""
    kept = [*words]
    for at in sorted(range(len(words)), key=lambda at: (-number[words[at]], -len(words[at]), at)):
        if len(words[at]) > 2:
            kept[at] = "…"
            short = re.sub("…+", "…", "".join(kept))
            if cell_width(short) <= width:
                return short
    return "".join(words)


def _common_ends(texts: Sequence[str], whole_words: bool = False) -> tuple[int, int]:
    """Return the numbers of characters at the start and at the end that all texts have."""
    first = texts[0]
    begin, end = _common(texts), _common([text[::-1] for text in texts])
    while whole_words and begin and first[begin - 1].isalnum():
        begin -= 1
    while whole_words and end and first[-end].isalnum():
        end -= 1
    return begin, min(end, min(map(len, texts)) - begin)


def _common(texts: Sequence[str]) -> int:
    """Return the length of the longest common prefix."""
    columns = enumerate(zip(*texts, strict=False))
    return next((at for at, column in columns if len({*column}) > 1), min(map(len, texts)))


def cell_width(text: str) -> int:
    """Return the columns of `text` on a terminal, where many East Asian characters take two."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    # Combining and invisible characters take no column.
    seen = (one for one in text if category(one) not in ("Mn", "Me", "Cf"))
    return sum(2 if east_asian_width(one) in "FW" else 1 for one in seen)
