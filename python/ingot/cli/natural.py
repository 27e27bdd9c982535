"""The order of names that people expect: ``layer.2`` before ``layer.10``."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Key = tuple[list[str | int], str]

_NUMBERS = re.compile(r"([0-9]+)")
# Longer runs of digits are no numbers to anybody, and Python takes long to read them as such.
_LONGEST_NUMBER = 18


def key(part: str) -> Key:
    """What parts of names are compared by: text by its letters, numbers by their values."""
    if part.isascii() and part.isdigit() and len(part) <= _LONGEST_NUMBER:
        return ["", int(part), ""], part
    found: list[str | int] = list(_NUMBERS.split(part))
    for at in range(1, len(found), 2):
        digits = str(found[at])
        found[at] = int(digits) if len(digits) <= _LONGEST_NUMBER else 10**_LONGEST_NUMBER
    # Last the text itself, so that `01` and `1` have an order too.
    return found, part


def ordered(names: Iterable[str]) -> list[str]:
    """The names in natural order, module by module.

    Parts between dots are put in order once each: of 500,000 names few parts differ.
    """
    parts = [(name.split("."), name) for name in names]
    distinct = {part for pieces, _ in parts for part in pieces}
    rank = {part: place for place, part in enumerate(sorted(distinct, key=key))}
    place_of = rank.__getitem__
    ranked = [(tuple(map(place_of, pieces)), name) for pieces, name in parts]
    ranked.sort()
    return [name for _, name in ranked]
