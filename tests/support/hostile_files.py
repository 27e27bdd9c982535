"""Files that the tests of a hostile environment share."""

from __future__ import annotations

from pathlib import Path

import numpy

ARRAY = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)


def file_of(header: bytes, data_nbytes: int, path: Path) -> None:
    """A file whose data is a hole: it takes no room on the disk, and reads as zeros."""
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.truncate(8 + len(header) + data_nbytes)
