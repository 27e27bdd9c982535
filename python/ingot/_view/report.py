"""Make a report of a model: headers, statistics, and thumbnails of its largest tensors."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

from ingot._native import statistics
from ingot._read.load import RAW

from .shelf import ReadFile, read_through

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ingot._native import Checkpoint, TensorInfo

    from .shelf import Opened


_BINS = 64
# The most rows and columns of a thumbnail, and the most tensors with one.
_CELLS = 32
_MOST_THUMBNAILS = 300
# The largest integer up to which doubles are exact.
_LARGEST_INTEGER = 1 << 53


def made(
    source: Opened, progress: Callable[[int, int], object] | None = None, max_nbytes: int | None = None
) -> str:
    """Return a report of a file or a checkpoint as JSON. Reads all tensors in little memory.

    A model of more than `max_nbytes` bytes has only its headers in the report.
    """
    checkpoint = source.handle
    model = read_through(source)
    nbytes = sum(info.nbytes for info in checkpoint.infos())
    is_read = max_nbytes is None or nbytes <= max_nbytes
    names = checkpoint.names() if is_read else []
    counted = statistics(checkpoint, names, bins=_BINS, progress=progress)
    report = {
        "label": model.label,
        "format": model.format,
        "files": [
            {"name": file.name, "size": file.size, "head": b64encode(file.head).decode()}
            for file in model.files
            if isinstance(file, ReadFile)
        ],
        "statistics": {
            name: _facts(found) for name, found in zip(names, counted, strict=True) if found is not None
        },
        "thumbnails": dict(_thumbnails(checkpoint)) if is_read else {},
    }
    return json.dumps(report, separators=(",", ":"), allow_nan=False)


def _facts(found: dict[str, Any]) -> dict[str, object]:
    facts = {field: _plain(value) for field, value in found.items() if field != "bins"}
    return facts | {"bins": found["bins"] if found["min"] is not None else []}


def _plain(value: int | float | None) -> object:
    """Return a number for JSON, as text if JavaScript cannot represent it."""
    if value is None or (
        value - value == 0 and not (isinstance(value, int) and abs(value) > _LARGEST_INTEGER)
    ):
        return value
    return str(value)


def _thumbnails(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, object]]]:
    infos = sorted(filter(_has_picture, checkpoint.infos()), key=lambda info: -info.nbytes)
    for info in infos[:_MOST_THUMBNAILS]:
        steps = [-(-dim // _CELLS) for dim in info.shape[-2:]]
        shape = [-(-dim // step) for dim, step in zip(info.shape[-2:], steps, strict=True)]
        index = (*(0 for _ in info.shape[:-2]), *(slice(None, None, step) for step in steps))
        data: memoryview = checkpoint.select(info.name, index, RAW)
        nbytes = shape[0] * shape[1] * _element_nbytes(info)
        yield info.name, {"shape": shape, "data": b64encode(data[:nbytes]).decode()}


def _has_picture(info: TensorInfo) -> bool:
    """Return whether a tensor is a matrix whose elements take whole bytes."""
    return len(info.shape) >= 2 and info.nbytes > 0 and info.dtype not in ("C64", "F4", "F6_E2M3", "F6_E3M2")


def _element_nbytes(info: TensorInfo) -> int:
    from math import prod

    return info.nbytes // prod(info.shape)


# The viewer as one file, alone or with a report.
#
# The file is `viewer.html` in `web`. `scripts/bundle-viewer` writes it.


_POLICY = '<meta http-equiv="Content-Security-Policy" content="'
_SCRIPT = '<script id="viewer">'


@cache
def _viewer() -> str:
    return (files("ingot") / "web" / "viewer.html").read_text("utf-8")


def policy() -> str:
    """Return the content security policy of the page."""
    return _viewer().partition(_POLICY)[2].partition('"')[0]


def page(*reports: str) -> str:
    """Return the viewer as HTML, with reports of `report.made` in it or with nothing open.

    Parameters
    ----------
    reports
        Up to two reports as JSON, as `made` returns them. Two are compared.
    """
    if not reports:
        return _viewer()
    # The reports are the only part that comes from a file: nothing in it may end the HTML element.
    data = f"[{','.join(reports)}]".replace("<", "\\u003c")
    element = f'<script type="application/json" id="report">{data}</script>\n'
    return _viewer().replace(_SCRIPT, element + _SCRIPT, 1)
