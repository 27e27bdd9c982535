"""Metadata that speaks of the tensors of its file. What becomes of it in another, the extension decides."""

from __future__ import annotations

import json

from ._native import RECORD_KEYS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    # For each name that is not stored, the name of the tensor that it shares, and which part of that.
    Views = dict[str, dict[str, Any]]

# Of an index: what it says of all its files. It is counted anew for others.
_TOTALS = ("total_size", "total_parameters")


def rendered(views: Views) -> str | None:
    """The record of these names; None where there are none. FORMAT.md, "Shared tensors"."""
    return json.dumps(views, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if views else None


def of_index(metadata: Mapping[str, str]) -> dict[str, str]:
    """What of the metadata of a file goes into the index of several: what would be true of them."""
    return {key: text for key, text in metadata.items() if key not in (*RECORD_KEYS, *_TOTALS)}
