"""Tables for the eye."""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Narrower than this no cell is cut, however narrow the terminal.
_NARROWEST = 12
_GAP = "  "
_BLOCK = 500


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False
    """Of numbers, which stand under each other by their last digit."""
    whole: bool = False
    """Of what people copy: never cut. A line that it makes too long goes on below."""
    spare: bool = False
    """Left out where the terminal is too narrow for all columns."""


def plain(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, with tabs between the cells."""
    rest = iter(rows)
    # Many at once, since hardly any needs escapes: to look at each cell takes half the time of a long list.
    while block := list(islice(rest, _BLOCK)):
        text = "".join(chain.from_iterable(block))
        if text.isascii() and text.isprintable():
            yield from map("\t".join, block)
        else:
            yield from ("\t".join(map(shown, row)) for row in block)


def aligned(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int, strong: Callable[[str], str]
) -> Iterator[str]:
    """The lines of a table, with its titles, that fit into `width` columns of a terminal."""
    cells = [[shown(cell) for cell in row] for row in rows]
    columns, cells, widths = _fitted(columns, cells, width)
    titles = [column.title for column in columns]
    yield strong(_line(titles, columns, widths))
    for row in cells:
        yield _line(row, columns, widths)


def _fitted(
    columns: Sequence[Column], cells: list[list[str]], width: int
) -> tuple[Sequence[Column], list[list[str]], list[int]]:
    """The columns that fit into `width`, their cells, and how wide each is."""
    titles = [column.title for column in columns]
    widths = [max(map(cell_width, row)) for row in zip(titles, *cells, strict=True)]
    _fit(widths, columns, width)
    spare = [at for at, column in enumerate(columns) if column.spare]
    if not spare or _over(widths, width) <= 0:
        return columns, cells, widths
    left = [at for at in range(len(columns)) if at != spare[-1]]
    return _fitted([columns[at] for at in left], [[row[at] for at in left] for row in cells], width)


def _over(widths: Sequence[int], width: int) -> int:
    """How many columns of a terminal a table is wider than `width`."""
    return sum(widths) + len(_GAP) * (len(widths) - 1) - width


def _fit(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Take from the widest columns of text, until the table is no wider than `width`."""
    over = _over(widths, width)
    text = [at for at, column in enumerate(columns) if not (column.right or column.whole)]
    while over > 0 and text:
        widest = max(text, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        second = max((widths[at] for at in text if widths[at] < widths[widest]), default=_NARROWEST)
        taken = min(over, widths[widest] - max(second, _NARROWEST)) or 1
        widths[widest] -= taken
        over -= taken


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = cut(cell, width)
        gap = " " * (width - cell_width(text))
        padded.append(gap + text if column.right else text + gap)
    return _GAP.join(padded).rstrip()


def cut(text: str, width: int) -> str:
    """`text` in `width` columns. What does not fit is taken from the middle: names differ at both ends."""
    if cell_width(text) <= width:
        return text
    head, tail = width // 2, width - width // 2 - 1
    while cell_width(text[:head]) > width // 2:
        head -= 1
    while tail and cell_width(text[-tail:]) > width - width // 2 - 1:
        tail -= 1
    return text[:head] + "…" + (text[-tail:] if tail else "")


def cell_width(text: str) -> int:
    """Columns that `text` takes on a terminal, where many characters of East Asia take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def boxed(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int, strong: Callable[[str], str]
) -> Iterator[str]:
    """The lines of a table in a box with round corners."""
    # A border and a blank at each end of each cell.
    inner = width - 4 - 3 * (len(columns) - 1)
    cells = [[shown(cell) for cell in row] for row in rows]
    titles = [column.title for column in columns]
    widths = [max(map(cell_width, row)) for row in zip(titles, *cells, strict=True)]
    _fit(widths, columns, inner + len(_GAP) * (len(widths) - 1))
    rules = ["─" * (one + 2) for one in widths]
    yield f"╭{'┬'.join(rules)}╮"
    yield _boxed(titles, widths, strong)
    yield f"├{'┼'.join(rules)}┤"
    for row in cells:
        yield _boxed(row, widths, str)
    yield f"╰{'┴'.join(rules)}╯"


def _boxed(cells: Sequence[str], widths: Sequence[int], style: Callable[[str], str]) -> str:
    fitted = [cut(cell, width) for cell, width in zip(cells, widths, strict=True)]
    padded = [text + " " * (width - cell_width(text)) for text, width in zip(fitted, widths, strict=True)]
    return f"│ {' │ '.join(map(style, padded))} │"
