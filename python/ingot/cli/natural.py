"""The order of names that people expect: ``layer.2`` before ``layer.10``."""

from __future__ import annotations

import re
from itertools import chain

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
    """The names in natural order, module by module."""
    given = list(names)
    return [given[place] for place in places(given)]


def places(names: list[str]) -> list[int]:
    """Where the first, the second and so on in natural order stand in `names`.

    Parts between dots are put in order once each: of 500,000 names few parts differ.
    """
    parts = [name.split(".") for name in names]
    distinct = sorted(set(chain.from_iterable(parts)), key=key)
    rank = dict(zip(distinct, range(len(distinct)), strict=True))
    ranks = [tuple(map(rank.__getitem__, pieces)) for pieces in parts]
    return sorted(range(len(names)), key=ranks.__getitem__)
