"""The errors of libraries that read other formats, as one of ours that names the file."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ingot._frameworks import installing
from ingot.errors import SafetensorError, _escaped

from .refusal import refused

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 300


@contextmanager
def reading(path: str, title: str) -> Iterator[None]:
    """Whatever is raised in here means that `path` is no whole `title`."""
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
            expected=title,
        ) from error


def lacks(package: str, title: str, extra: str) -> ModuleNotFoundError:
    """What to install so that `title` can be read."""
    return ModuleNotFoundError(
        f"converting {title} needs {package}, which is not installed: {installing(extra)}",
        name=package,
    )
