"""The results of calls: dataclasses with a short repr."""

from __future__ import annotations

from dataclasses import fields

from .text import brief

_LONGEST = 2000


class Report:
    """A dataclass whose repr shows the beginning of long values, and leaves out None where it is the default."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = ((one, getattr(self, one.name)) for one in fields(self) if one.repr)  # type: ignore[arg-type]
        pairs = ((one.name, value) for one, value in values if value is not None or one.default is not None)
        shown = ", ".join(f"{name}={brief(value)}" for name, value in pairs)
        text = f"{type(self).__qualname__}({shown})"
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…)"
