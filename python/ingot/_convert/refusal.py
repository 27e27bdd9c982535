"""Why a source is not converted, in one form."""

from __future__ import annotations

from typing import Any

from ingot.errors import ConversionError, _escaped, _quoted


def refused(
    path: str, reason: str, *, code: str, tensor: str | None = None, expected: Any = None, found: Any = None
) -> ConversionError:
    """The error that names the file, the tensor if it is about one, and `reason`, escaped already."""
    where = _escaped(path) if tensor is None else f"{_escaped(path)}: tensor {_quoted(tensor)}"
    return ConversionError(
        f"{where}: {reason}", code=code, path=path, tensor=tensor, expected=expected, found=found
    )
