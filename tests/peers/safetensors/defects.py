"""What the tests of upstream's defects share."""

from __future__ import annotations

import json
from typing import Any

import numpy


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ARRAY = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
