"""The results of calls: dataclasses with a short repr."""

from __future__ import annotations

from dataclasses import fields

from .text import brief

_LONGEST = 2000


class Report:
    """A dataclass whose repr shows the beginning of long values, and leaves out None."""

    __slots__ = ()

    def __repr__(self) -> str:
        pairs = ((one.name, getattr(self, one.name)) for one in fields(self) if one.repr)  # type: ignore[arg-type]
        shown = ", ".join(f"{name}={brief(value)}" for name, value in pairs if value is not None)
        text = f"{type(self).__qualname__}({shown})"
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…)"
