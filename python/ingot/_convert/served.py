"""Read a directory of torch.distributed.checkpoint as if it were one .safetensors file.

The header is made from the entries of the reader that converts the directory. A range of the data section is
read from the records of the tensors in it.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy

from ingot._read.source import Reader, done
from ingot.errors import ConversionError

from .formats import FORMATS
from .limits import Budget, limits, source_nbytes
from .selection import checked
from .source import Options
from .sources.distributed import METADATA
from .values import nbytes
from .write import check_native

if TYPE_CHECKING:
    from ingot.numpy import Array

    Stamp = tuple[int, int, int]


class Directory(Reader):
    """A directory whose tensors are read by byte ranges.

    Raises
    ------
    ConversionError
        The directory is damaged, or a tensor in it has no dtype in a file of tensors.
    """

    at_once = 0

    def __init__(self, path: str) -> None:
        self.name = path
        metadata = os.path.join(path, METADATA)
        reading = Options(Budget(metadata, limits(source_nbytes(metadata, True), None)), False, objects=False)
        with FORMATS["distcp"].opened(metadata, reading) as contents:
            try:
                entries = [checked(contents, entry) for entry in contents.entries]
                check_native(metadata, entries)
            except ConversionError as error:
                # The header has all tensors, before the caller's choice is known.
                error.add_note("ingot.convert with drop= writes a file of the other tensors")
                raise
            # Aligned in the data section: the longest elements first.
            self._entries = sorted(entries, key=lambda entry: -nbytes(entry.code, (1,)))
        self._stamps = {file: _stamp(file) for file in {metadata, *contents.files}}
        self._begins = [0]
        for one in self._entries:
            self._begins.append(self._begins[-1] + nbytes(one.code, one.shape))
        self._head = self._header(contents.metadata)
        self.nbytes = len(self._head) + self._begins[-1]

    def _header(self, metadata: dict[str, str]) -> bytes:
        """Return the length of a header, and the header."""
        header: dict[str, Any] = {"__metadata__": metadata}
        for one, *span in zip(self._entries, self._begins, self._begins[1:], strict=False):
            header[one.name] = {"dtype": one.code, "shape": one.shape, "data_offsets": span}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def ask(self, begin: int, end: int) -> Future[Any]:
        """Request the bytes of a range: a buffer."""
        parts = self._spans(max(begin - len(self._head), 0), end - len(self._head))
        if begin < len(self._head):
            parts.insert(0, numpy.frombuffer(self._head[begin:end], numpy.uint8))
        return done(parts[0] if len(parts) == 1 else numpy.concatenate(parts))

    def _spans(self, begin: int, end: int) -> list[Array]:
        """Return the bytes of a range of the data section, of one tensor or several."""
        found = []
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            first, last = self._begins[number], min(self._begins[number + 1], end)
            if begin < last:
                span = self._entries[number].span
                assert span is not None
                found.append(span(begin - first, last - first))
            begin, number = max(begin, last), number + 1
        return found

    def ask_nbytes(self) -> Future[int | None]:
        """Request the current size. None if a file was replaced."""
        return done(self.nbytes if all(_stamp(file) == seen for file, seen in self._stamps.items()) else None)


def _stamp(file: str) -> Stamp | None:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
