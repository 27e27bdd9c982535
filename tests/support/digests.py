"""Helpers of the tests of digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import blake3
import xxhash

import ingot
import ingot.numpy
import ingot.torch

ORACLES = {
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3": lambda data: xxhash.xxh3_64(data).hexdigest(),
    "xxh3_128": lambda data: xxhash.xxh3_128(data).hexdigest(),
}


KEY = "ingot.checksums"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def record(path: Path) -> dict[str, str]:
    """The digests that a file keeps, by tensor."""
    found: dict[str, str] = json.loads((ingot.inspect(path).metadata or {})[KEY])["tensors"]
    return found
