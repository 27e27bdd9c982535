"""Records of the generators for `make proof`: lines of JSON in the file that `INGOT_RECORD` names."""

from __future__ import annotations

import json
import os
from pathlib import Path


def note(what: str, count: int, wrong: int, **more: object) -> None:
    """Record that `count` of `what` were tried, and how many were wrong."""
    path = os.environ.get("INGOT_RECORD")
    line = {"what": what, "count": count, "wrong": wrong, **more}
    print(json.dumps(line))
    if path:
        # Lines of this length are appended at once, by several processes too.
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
