"""Names and paths in messages: escaped, in quotes and not too long. Sizes and counts for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from ingot.errors import SafetensorError

E = TypeVar("E", bound=SafetensorError)

# The first and the last of each range, in hexadecimal.
_RANGES = (
    "ad-ad 34f-34f 61c-61c 115f-1160 17b4-17b5 180b-180f 200b-200f 2028-202e 2060-206f 3164-3164 d800-dfff "
    "fe00-fe0f feff-feff ffa0-ffa0 fff0-fffb 1bca0-1bca3 1d173-1d17a e0000-e0fff"
)
_INVISIBLE = [[int(end, 16) for end in one.split("-")] for one in _RANGES.split()]
_LONGEST_NAME = 200
# Limits of `brief`: items of a collection, characters of a text, and characters of a repr.
_MOST_ITEMS = 3
_LONGEST_TEXT = 60
_LONGEST_VALUE = 400


class _Escapes(dict[int, "str | int"]):
    """Characters that could steer a terminal or hide text, as escapes.

    Escape the same characters as `Quoted` in crates/format, and lone surrogates, which only Python has.
    """

    def __missing__(self, point: int) -> str | int:
        if point < 0x20 or 0x7F <= point < 0xA0:
            text: str | int = f"\\x{point:02x}"
        elif any(first <= point <= last for first, last in _INVISIBLE):
            text = f"\\u{point:04x}"
        else:
            text = point
        self[point] = text
        return text


def _escaped(text: str | bytes) -> str:
    """Return `text` with escapes for the characters that are unsafe on a terminal."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    # Nearly all are plain, and every load names its file.
    return text if text.isascii() and text.isprintable() else text.translate(_Escapes())


def _quoted(name: object) -> str:
    """Return a name between backticks, escaped, and cut to the length that messages allow."""
    text = name if isinstance(name, str) else repr(name)
    cut = text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"
    return f"`{_escaped(cut)}`"


def located(
    kind: type[E], reason: str, *, path: str | bytes | None = None, tensor: str | None = None, **facts: Any
) -> E:
    """Return an error whose message begins with the file and the tensor."""
    file = "" if path is None else f"{_escaped(path)}: "
    subject = "" if tensor is None else f"tensor {_quoted(tensor)}: "
    return kind(f"{file}{subject}{reason}", path=path, tensor=tensor, **facts)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add `path` to errors of the system that name no file, as the errors of reading an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def nbytes(size: int) -> str:
    """Return a size in powers of 1000, as file managers and the Hub show it."""
    return f"{size:,} B" if size < 1000 else scaled(size, ("kB", "MB", "GB", "TB", "PB", "EB"), " ")


def scaled(number: float, units: tuple[str, ...], gap: str) -> str:
    """Return `number`, at least 1000, with three digits and the unit that leaves it below 1000."""
    number, rest = number / 1000, list(units)
    # Below 1000 by the amount that rounding to three digits could add.
    while number >= 999.5 and len(rest) > 1:
        number /= 1000
        rest.pop(0)
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}{gap}{rest[0]}"


def plural(number: int, noun: str) -> str:
    """Return a number with a noun: ``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def brief(value: object) -> str:
    """Return the repr of a value; of a long text or collection the beginning and the length."""
    if isinstance(value, (str, bytes)) and len(value) > _LONGEST_TEXT:
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:_LONGEST_TEXT]!r}… ({len(value):,} {unit})"
    shown = _items(value) if type(value) in _BRACKETS else repr(value)
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}…"


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", dict: "{}", set: "{}", frozenset: "{}"}


def _items(value: Any) -> str:
    first = islice(value.items() if isinstance(value, dict) else value, _MOST_ITEMS)
    shown = [f"{brief(one[0])}: {brief(one[1])}" if isinstance(value, dict) else brief(one) for one in first]
    if len(value) > _MOST_ITEMS:
        shown.append(f"… {len(value) - _MOST_ITEMS:,} more")
    if type(value) is tuple and len(value) == 1:
        shown.append("")
    brackets = _BRACKETS[type(value)]
    return f"{brackets[0]}{', '.join(shown).rstrip()}{brackets[1]}"


def first_lines(lines: Sequence[str], most: int = 10) -> str:
    """Return the first lines, and the number of the others."""
    shown = [line if len(line) <= _LONGEST_VALUE else f"{line[:_LONGEST_VALUE]}…" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"… and {len(lines) - most:,} more")
    return "\n".join(shown)
