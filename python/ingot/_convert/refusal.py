"""Why a source is not converted, in one form."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from ingot._base.frameworks import installing
from ingot._base.text import _escaped, _quoted
from ingot.errors import ConversionError, SafetensorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 300


def refused(
    path: str,
    reason: str,
    *,
    code: str | None,
    tensor: str | None = None,
    expected: Any = None,
    found: Any = None,
) -> ConversionError:
    """The error that names the file, the tensor if it is about one, and `reason`, escaped already."""
    where = _escaped(path) if tensor is None else f"{_escaped(path)}: tensor {_quoted(tensor)}"
    return ConversionError(
        f"{where}: {reason}", code=code, path=path, tensor=tensor, expected=expected, found=found
    )


@contextmanager
def reading(path: str, title: str, tensor: str | None = None) -> Iterator[None]:
    """Turn any exception into a `ConversionError`: `path` is no whole `title`."""
    try:
        yield
    except (SafetensorError, ImportError, MemoryError):
        raise
    except Exception as error:
        said = _escaped(" ".join(str(error).split())[:_LONGEST])
        raise refused(
            path,
            f"not {title} that can be read: {said or type(error).__name__}",
            code="unreadable",
            tensor=tensor,
            expected=title,
        ) from error


def lacks(package: str, title: str, extra: str) -> ModuleNotFoundError:
    """What to install so that `title` can be read."""
    return ModuleNotFoundError(
        f"converting {title} needs {package}, which is not installed: {installing(extra)}",
        name=package,
    )
