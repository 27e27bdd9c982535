"""The vectors of this folder as Python objects. README.md documents the keys."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def from_hex(text: str) -> bytes:
    """Return bytes from hexadecimal digits, with white space anywhere, and text between single quotes."""
    parts = text.split("'")
    return b"".join(part.encode() if odd % 2 else bytes.fromhex(part) for odd, part in enumerate(parts))


@dataclass(frozen=True)
class Vector:
    """A file, and the expected verdict of a reader."""

    keys: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.keys["name"]

    @property
    def format(self) -> str:
        return self.keys.get("format", "safetensors")

    @property
    def accepted(self) -> bool:
        return self.keys["expect"] == "accept"

    @property
    def code(self) -> str | None:
        return self.keys.get("code")

    @property
    def strictly_accepted(self) -> bool:
        return self.accepted and self.keys.get("strict") != "reject"

    @property
    def limit(self) -> int | None:
        return self.keys.get("limit")

    @property
    def accepted_upstream(self) -> bool:
        return self.keys["upstream"] == "accept"

    def file(self) -> bytes:
        """The whole file."""
        if "file" in self.keys:
            return self.keys["file"].encode()
        if "file_hex" in self.keys:
            return from_hex(self.keys["file_hex"])
        header = self._header()
        prefix = self.keys.get("length_prefix", len(header))
        prefix = from_hex(prefix) if isinstance(prefix, str) else prefix.to_bytes(8, "little")
        data = from_hex(self.keys.get("data_hex", "")) + bytes(self.keys.get("data_nbytes", 0))
        return prefix + header + data

    def _header(self) -> bytes:
        if "header" in self.keys:
            return self.keys["header"].encode()
        if "header_hex" in self.keys:
            return from_hex(self.keys["header_hex"])
        return b"".join(piece.encode() * times for piece, times in self.keys["header_repeat"])


@cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for kind, cases in tomllib.loads(path.read_text("utf-8")).items():
            tables.setdefault(kind, []).extend(cases)
    return tables


def vectors() -> list[Vector]:
    """All files to read."""
    return [Vector(keys) for keys in _tables()["vector"]]


def writings() -> list[dict[str, Any]]:
    """All lists of tensors to write."""
    return _tables()["writing"]


def indexes() -> list[dict[str, Any]]:
    """All indexes of sharded checkpoints, with their ``bytes``."""
    return [case | {"bytes": _index_bytes(case)} for case in _tables()["index"]]


def _index_bytes(case: dict[str, Any]) -> bytes:
    if "text" in case:
        return case["text"].encode()
    if "text_hex" in case:
        return from_hex(case["text_hex"])
    return b"".join(piece.encode() * times for piece, times in case["text_repeat"])


def counts() -> list[dict[str, Any]]:
    """All models whose parameters are counted."""
    return _tables()["count"]
