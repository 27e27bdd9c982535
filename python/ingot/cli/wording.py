"""How names, numbers and sizes are written for people."""

from __future__ import annotations

from ingot._text import _Escapes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_ESCAPES = _Escapes()


def shown(text: str) -> str:
    """`text` with every character escaped that steers a terminal or hides what it says."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_ESCAPES)


def nbytes(size: int) -> str:
    """A size in powers of 1000, as file managers and the Hub give it."""
    return f"{size:,} B" if size < 1000 else _scaled(size, ("kB", "MB", "GB", "TB", "PB", "EB"), " ")


def count(number: int) -> str:
    """A number of parameters: ``22.7M``."""
    return str(number) if number < 1000 else _scaled(number, ("K", "M", "B", "T", "Q"), "")


def _scaled(number: int, units: tuple[str, ...], gap: str) -> str:
    scaled, rest = number / 1000, list(units)
    # Not 1000.0: what three digits would round up to is one of the next unit.
    while scaled >= 999.5 and len(rest) > 1:
        scaled /= 1000
        rest.pop(0)
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f}{gap}{rest[0]}"


def shape(dims: Iterable[int]) -> str:
    """``[30522, 384]``."""
    return f"[{', '.join(map(str, dims))}]"


def plural(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def real(value: float | None) -> str:
    """A value in as many digits as a person compares; ``-`` where there is none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"
