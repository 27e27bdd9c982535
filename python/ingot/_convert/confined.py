"""Names of other files that belong to a file: they stay inside its folder."""

from __future__ import annotations

import os
import re

from ingot._base.text import _quoted

from .refusal import refused

# The name of a file that says which part of how many it is.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<ending>\w+)", re.DOTALL)


def inside(path: str, location: object, key: str, *, may_leave_by_link: bool = False) -> str:
    """Return the path of the file that `path` calls `location`, under `key`.

    A link may not lead out of the folder. If the file at `path` is a link itself, others may lead to where it
    does: caches of downloads have the files of all models in one folder, and links to them.
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
    real = os.path.realpath(found)
    folders = (os.path.realpath(os.path.dirname(path)), os.path.dirname(os.path.realpath(path)))
    if not may_leave_by_link and not any(real.startswith(os.path.join(folder, "")) for folder in folders):
        raise refused(
            path,
            f"{_quoted(key)} is in {_quoted(location)}, which is a link out of the folder: "
            "expected a file inside it",
            code="outside",
            tensor=key,
            found=location,
        )
    if not os.path.isfile(real):
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
