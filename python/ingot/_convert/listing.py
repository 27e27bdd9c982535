"""What a file of another format holds, without its values."""

from __future__ import annotations

import os
from typing import NamedTuple

from . import values
from .formats import FORMATS, resolved
from .limits import Budget, limits, source_nbytes
from .source import Options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .report import LeftOut
    from .source import Entry


# A listing makes no tensor, so they may be of any size.
_ANY_NBYTES = 1 << 63


class Listed(NamedTuple):
    """A tensor of another format."""

    name: str
    dtype: str
    """The code in a header; what the source calls it, where that has none."""
    shape: tuple[int, ...] | None
    nbytes: int | None
    """As they are stored. None, like the shape, where the source is refused for this tensor."""
    file: str
    """The path of the file that holds it."""


class Listing(NamedTuple):
    """All that one source holds."""

    path: str
    format: str
    """A word of `FORMATS`."""
    files: tuple[str, ...]
    tensors: list[Listed]
    left_out: tuple[LeftOut, ...]
    metadata: dict[str, str]


def listed(path: str) -> Listing:
    """What the file or folder at `path` holds, by its header or index. No value is read.

    Raises
    ------
    ConversionError, OSError, ModuleNotFoundError
        As `ingot.convert`, but for what only values show.
    """
    found, word = resolved(path, None, is_whole=False)
    held = limits(source_nbytes(found, FORMATS[word].is_folder), None)._replace(tensors=_ANY_NBYTES)
    options = Options(dequantize=True, budget=Budget(found, held), values=False)
    with FORMATS[word].opened(found, options) as contents:
        tensors = [_listed(found, entry) for entry in contents.entries]
        named = {found: None} if os.path.isfile(found) else {}
        files = tuple(named | dict.fromkeys(tensor.file for tensor in tensors))
        return Listing(found, word, files, tensors, tuple(contents.left_out), dict(contents.metadata))


def _listed(path: str, entry: Entry) -> Listed:
    file = entry.file or (path if entry.region is None else entry.region.path)
    if entry.fault is not None:
        if getattr(entry.fault, "code", None) == "unsafe-pickle":
            # A listing selects nothing, and its reader should know.
            raise entry.fault
        return Listed(entry.name, str(getattr(entry.fault, "found", None) or "?"), None, None, file)
    code, size = entry.stored or (entry.code, values.nbytes(entry.code, entry.shape))
    return Listed(entry.name, code, entry.shape, size, file)
