"""Checkpoints in several files with an index, of torch or of this package: ``….index.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ingot._base.text import _quoted
from ingot._convert.formats import inside, is_ours
from ingot._convert.limits import reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, size_of

from . import native
from . import torch as torch_source

TITLE = "an index of a checkpoint"
# Of the index, in bytes. One for a million tensors takes 100 MB.
MAX_NBYTES = 250_000_000


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The tensors of all files that the index names, which must be those that it says."""
    weight_map, metadata = _index(path)
    # Every file once, under the first tensor that names it.
    named = {shard: name for name, shard in reversed(weight_map.items())}
    shards = {shard: inside(path, shard, named[shard], may_leave_by_link=True) for shard in sorted(named)}
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    with ExitStack() as stack:
        for shard, file in shards.items():
            contents = stack.enter_context(_shard(file, options))
            _check(path, shard, contents, weight_map)
            entries += [replace(entry, file=file) for entry in contents.entries]
            left_out += contents.left_out
            metadata = metadata | contents.metadata
        _refuse_missing(path, weight_map, entries)
        yield Contents(entries, left_out, metadata)


def files(path: str) -> list[str]:
    """The files that the index at `path` names."""
    weight_map, _ = _index(path)
    return [
        inside(path, shard, "weight_map", may_leave_by_link=True)
        for shard in sorted(set(weight_map.values()))
    ]


def _shard(file: str, options: Options) -> Any:
    with open(file, "rb") as opened_file:
        head = opened_file.read(8)
    is_pickle = head.startswith((b"PK\3\4", b"\x80")) and not is_ours(file)
    return (torch_source if is_pickle else native).opened(file, options)


def _index(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """The file of each tensor, and the metadata that is text."""
    if size_of(path) > MAX_NBYTES:
        raise refused(
            path,
            f"an index of {size_of(path):,} bytes, and the limit is {MAX_NBYTES:,}",
            code="too-large",
            expected=MAX_NBYTES,
        )
    with reading(path, TITLE), open(path, encoding="utf-8") as file:
        index = json.load(file, object_pairs_hook=_unique)
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            raise ValueError("weight_map and metadata must be objects")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map must give a file name for each tensor")
    return weight_map, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _check(path: str, shard: str, contents: Contents, weight_map: dict[str, str]) -> None:
    for entry in contents.entries:
        listed = weight_map.get(entry.name)
        if listed != shard:
            said = f"in {_quoted(listed)}" if listed is not None else "in no file"
            raise refused(
                path,
                f"tensor {_quoted(entry.name)} is in {_quoted(shard)}, and by the index {said}",
                code="index-mismatch",
                tensor=entry.name,
                expected=listed,
                found=shard,
            )


def _refuse_missing(path: str, weight_map: dict[str, str], entries: list[Entry]) -> None:
    missing = weight_map.keys() - {entry.name for entry in entries}
    if missing:
        name = min(missing)
        raise refused(
            path,
            f"tensor {_quoted(name)} is not in {_quoted(weight_map[name])}, where it is by the index",
            code="index-mismatch",
            tensor=name,
            expected=weight_map[name],
        )
