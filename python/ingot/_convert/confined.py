"""Names of other files that stand in a file: they stay inside its folder."""

from __future__ import annotations

import os

from ingot._text import _quoted

from .refusal import refused


def inside(path: str, location: object, key: str) -> str:
    """The path of the file that `path` calls `location`, under `key`.

    Links are followed only in the way that caches of downloads need: what `location` names may be one, and it
    has to be a regular file in the end.
    """
    reason = _fault(location)
    if reason:
        raise refused(
            path,
            f"{_quoted(key)} names the file {_quoted(location)}, which {reason}: expected a path "
            "inside the folder",
            code="outside",
            found=location,
        )
    assert isinstance(location, str)
    found = os.path.join(os.path.dirname(path), *location.split("/"))
    if not os.path.isfile(found):
        raise refused(
            path,
            f"{_quoted(key)} is in {_quoted(location)}, and there is no such file",
            code="missing-file",
            found=location,
        )
    return found


def _fault(location: object) -> str | None:
    """Why it is no path inside the folder, the same on every system."""
    if not isinstance(location, str):
        return "is no text"
    if "\0" in location or "\\" in location or ":" in location:
        return "has a character that paths do not have"
    parts = location.split("/")
    if location.startswith(("/", "~")) or ".." in parts:
        return "leaves the folder"
    if "" in parts or "." in parts:
        return "is no plain path"
    return None
