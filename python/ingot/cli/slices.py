"""``NAME[0:2,:5]``: a tensor and a part of it, as people type them."""

from __future__ import annotations

import re

import click

from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from types import EllipsisType

    Index = int | slice | EllipsisType

_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def parsed(text: str, names: Container[str]) -> tuple[str, tuple[Index, ...]]:
    """The name, and the index into it: empty for all of the tensor.

    What is a name as a whole is that name, whatever brackets stand in it.
    """
    if text in names or not text.endswith("]") or "[" not in text:
        return text, ()
    name, _, inside = text[:-1].rpartition("[")
    parts = inside.split(",") if inside.strip() else []
    return name, tuple(_part(part.strip(), text) for part in parts)


def _part(part: str, text: str) -> Index:
    if part == "...":
        return ...
    bounds = [_bound(bound.strip(), part, text) for bound in part.split(":")]
    if len(bounds) == 1 and bounds[0] is not None:
        return bounds[0]
    if 2 <= len(bounds) <= 3:
        return slice(*bounds)
    raise _refused(part, text)


def _bound(bound: str, part: str, text: str) -> int | None:
    if not bound:
        return None
    if not _NUMBER.fullmatch(bound):
        raise _refused(part, text)
    return int(bound)


def _refused(part: str, text: str) -> click.UsageError:
    return click.UsageError(
        f"`{shown(text)}`: expected a number, first:last, first:last:step or ... between the commas, "
        f"found `{shown(part)}`"
    )
