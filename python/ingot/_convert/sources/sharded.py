"""Checkpoints in several files with an index, of torch or of this package: ``….index.json``."""

from __future__ import annotations

import json
from typing import Any

from ingot._base.text import _quoted
from ingot._convert.formats import FORMATS, inside, is_ours
from ingot._convert.source import Contents, size_of

# Bytes of the index. One for a million tensors takes 100 MB.
MAX_NBYTES = 250_000_000


def read(contents: Contents) -> None:
    """Add the tensors of all files that the index names, which must be the tensors of the index."""
    weight_map, contents.metadata = _index(contents)
    # Every file once, under the first tensor that names it.
    named = {shard: name for name, shard in reversed(weight_map.items())}
    files = {
        inside(contents.path, shard, named[shard], may_leave_by_link=True): shard for shard in sorted(named)
    }
    for file in files:
        format = FORMATS["torch" if _is_pickle(file) else "safetensors"]
        part = contents.part(file, format.title)
        format.read(part)
        contents.metadata |= part.metadata
    for entry in contents.entries:
        assert entry.file is not None
        listed, shard = weight_map.get(entry.name), files[entry.file]
        if listed != shard:
            words = f"in {_quoted(listed)}" if listed is not None else "in no file"
            reason = f"tensor {_quoted(entry.name)} is in {_quoted(shard)}, but by the index {words}"
            raise contents.refusal(reason, "index-mismatch", entry.name, listed, shard)
    missing = weight_map.keys() - {entry.name for entry in contents.entries}
    if missing:
        name = min(missing)
        reason = f"tensor {_quoted(name)} is not in {_quoted(weight_map[name])}, where the index expects it"
        raise contents.refusal(reason, "index-mismatch", name, weight_map[name])


def _is_pickle(file: str) -> bool:
    with open(file, "rb") as opened_file:
        head = opened_file.read(8)
    return head.startswith((b"PK\3\4", b"\x80")) and not is_ours(file)


def _index(contents: Contents) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of each tensor, and the metadata that is text."""
    nbytes = size_of(contents.path)
    if nbytes > MAX_NBYTES:
        reason = f"an index of {nbytes:,} bytes, and the limit is {MAX_NBYTES:,}"
        raise contents.refusal(reason, "too-large", expected=MAX_NBYTES)
    with contents.reading(), open(contents.path, encoding="utf-8") as file:
        index = json.load(file, object_pairs_hook=_unique)
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            raise ValueError("weight_map and metadata must be objects")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map must have a file name for each tensor")
    return weight_map, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found
