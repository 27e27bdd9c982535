"""The results of calls: dataclasses with a short repr, and pickles that name no private module.

Classes keep the name of their defining module, which `inspect.getsource`, IPython and type hints need.
Pickles contain only names in `ingot`, so that they can be loaded after a class has moved to another module.
"""

from __future__ import annotations

import sys
from typing import Any

from .text import brief

_LONGEST = 2000


class Report:
    """A dataclass whose repr shows the start of long values, and omits fields with the default None."""

    __slots__ = ()

    # The name in `ingot`, for pickles; by default the name of the class.
    _path = ""
    # `TensorInfo` has no fields of its own to be checked.
    __pydantic_config__ = {"arbitrary_types_allowed": True}  # noqa: RUF012

    def __repr__(self) -> str:
        # Imported here: handles use `restored` only.
        from dataclasses import fields

        values = ((one, getattr(self, one.name)) for one in fields(self) if one.repr)  # type: ignore[arg-type]
        pairs = ((one.name, value) for one, value in values if value is not None or one.default is not None)
        shown = ", ".join(f"{name}={brief(value)}" for name, value in pairs)
        text = f"{type(self).__qualname__}({shown})"
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…)"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a line of the single values, and a table of the items of the others."""
        from dataclasses import fields

        from .html import page, table

        facts: list[str] = []
        rows: list[tuple[object, ...]] = []
        for name in (one.name for one in fields(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, dict):
                rows += ((name, key, *_cells(item)) for key, item in value.items())
            elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
                rows += ((name, *_cells(item)) for item in value)
            elif value not in (None, ""):
                facts.append(f"{name}: {value:,}" if type(value) is int else f"{name}: {value}")
        return page(f"ingot.{self._path or type(self).__qualname__}", facts, table(rows))

    def __reduce__(self) -> tuple[Any, ...]:
        from dataclasses import fields

        named = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return restored, (self._path or type(self).__qualname__, (), named)


def _cells(item: object) -> tuple[object, ...]:
    return tuple(item) if isinstance(item, tuple) else (item,)


def restored(path: str, arguments: tuple[Any, ...], named: dict[str, Any] | None = None) -> Any:
    """Return the contents of a pickle: a call of the function or class at `path` in `ingot`."""
    found: Any = sys.modules["ingot"]
    for name in path.split("."):
        found = getattr(found, name)
    return found(*arguments, **(named or {}))


def reduced(self: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of `__reduce__` of a named tuple."""
    return restored, (type(self).__qualname__, tuple(self)), getattr(self, "__dict__", None)


# The name that pickles have for it.
restored.__module__ = "ingot"
