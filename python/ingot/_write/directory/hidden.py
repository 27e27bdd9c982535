"""The names of files that are yet to get their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

PREFIX = re.compile(r"\.ingot-[0-9a-f]{8}\.")


def new_prefix() -> str:
    """What names begin with of files that are yet to get their own."""
    return f".ingot-{token_hex(4)}."


@contextmanager
def hidden(prefix: str | None = None) -> Iterator[str]:
    """Give what such names begin with, before the name that the file is to have.

    What is raised in the block speaks of the latter, which is the one that the user knows.
    """
    prefix = prefix or new_prefix()
    with called(prefix, ""):
        yield prefix


@contextmanager
def called(hidden: str, shown: str) -> Iterator[None]:
    """What is raised in the block says `shown` in place of `hidden`."""
    try:
        yield
    except Exception as fault:
        _call(hidden, shown, fault)
        raise


def _call(hidden: str, shown: str, fault: Exception) -> None:
    fault.args = tuple(_with(hidden, shown, part) for part in fault.args)
    for field in ("path", "filename", "filename2"):
        if isinstance(found := getattr(fault, field, None), (str, bytes)):
            setattr(fault, field, _with(hidden, shown, found))
    if isinstance(fault, OSError) and fault.filename2 is not None and fault.filename == fault.filename2:
        # A rename between the two names, of which one is left.
        del fault.filename2


def _with(hidden: str, shown: str, found: object) -> object:
    if isinstance(found, str):
        return found.replace(hidden, shown)
    return found.replace(os.fsencode(hidden), os.fsencode(shown)) if isinstance(found, bytes) else found
