"""Files that Python's own libraries write, with the errors that saving has."""

from __future__ import annotations

from io import FileIO

from .errors import StorageError, _escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Storage(FileIO):
    """A file for bytes, whose failure is a `StorageError` with its path.

    To be written through a buffer, which calls again for what was not taken at once.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            path = str(self.name)
            raise StorageError(
                f"{_escaped(path)}: could not write: {fault.strerror}",
                errno=fault.errno,
                code="write",
                path=path,
            ) from fault
