"""How a defect of a peer is shown, and where those that can be are listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

Measure = Callable[[Path], Any]


DEFECTS: list[Any] = []


def defect(expected: Any) -> Callable[[Measure], Measure]:
    """Marks what a wheel does wrong: the function is given an empty folder and gives `expected`."""

    def note(measure: Measure) -> Measure:
        DEFECTS.append(pytest.param(measure, expected, id=measure.__name__))
        return measure

    return note


def raised(call: Callable[[], Any]) -> str:
    """The class of what `call` raises, and the first words of it. Panics are no `Exception`."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:60].rstrip()
    return "nothing"


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ARRAY = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
