"""How names, numbers and sizes are written for people."""

from __future__ import annotations

from ingot._base.text import _Escapes, scaled
from ingot._base.text import nbytes as nbytes
from ingot._base.text import plural as plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_ESCAPES = _Escapes()


def shown(text: str) -> str:
    """`text` with every character escaped that steers a terminal or hides what it says."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_ESCAPES)


def count(number: int) -> str:
    """A number of parameters: ``22.7M``."""
    return str(number) if number < 1000 else scaled(number, ("K", "M", "B", "T", "Q"), "")


def shape(dims: Iterable[int]) -> str:
    """``[30522, 384]``."""
    return f"[{', '.join(map(str, dims))}]"


def real(value: float | None) -> str:
    """A value in as many digits as a person compares; ``-`` where there is none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"
