"""Members of ZIP archives, read by the directory at the end after that has been checked.

Two readers of one archive see two things where names stand twice, where members overlap, or where the
directory and a member's own header differ. Such archives are refused, and so are encrypted ones.
"""

from __future__ import annotations

import os
import struct
import zipfile
from io import RawIOBase
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot._text import _quoted
from ingot.errors import ConversionError

from .limits import OBJECT_NBYTES
from .refusal import reading, refused

if TYPE_CHECKING:
    from typing import IO

    from .limits import Budget

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Of a member's own header: signature, version, flags, method, time, date, checksum, two sizes, two lengths.
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x1 | 0x40


class Member(NamedTuple):
    """One file in an archive."""

    name: str
    nbytes: int
    """When it is unpacked."""
    position: int
    """Of its bytes in the archive."""
    is_packed: bool


def members(path: str, budget: Budget | None = None) -> dict[str, Member]:
    """All files of the archive at `path`, by name. Without a budget, of one that was written just now."""
    found: dict[str, Member] = {}
    with reading(path, "a ZIP archive"), open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            if info.is_dir():
                continue
            position = _checked(path, file, info)
            if info.filename in found:
                raise _refusal(path, info, "stands in it twice", "duplicate-member")
            if info.header_offset < end:
                raise _refusal(path, info, "lies within another member", "overlap")
            end = position + info.compress_size
            packed = info.compress_type != zipfile.ZIP_STORED
            if not packed and info.file_size != info.compress_size:
                raise _refusal(path, info, "is stored, and has two sizes", "zip-headers")
            found[info.filename] = Member(info.filename, info.file_size, position, packed)
        if end > archive.start_dir:
            raise refused(
                path,
                "a member reaches into the directory of the archive",
                code="overlap",
            )
    if budget is not None:
        budget.hold(len(found) * OBJECT_NBYTES)
        # Those that are stored take as many bytes in the file.
        budget.unpack(sum(member.nbytes for member in found.values() if member.is_packed))
    return found


def opened(path: str, member: Member) -> IO[bytes]:
    """The member, to be read from its begin. Closing it closes the archive."""
    archive = zipfile.ZipFile(path)
    stream = archive.open(member.name)
    # The archive keeps its file open for as long as a member of it is.
    archive.close()
    return stream


class Window(RawIOBase):
    """A member that is not packed, read where it stands and in any order. Its checksum is not looked at."""

    def __init__(self, archive: IO[bytes], member: Member) -> None:
        self._archive = archive
        self._begin, self._nbytes, self._at = member.position, member.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(self._nbytes - self._at, 0)]
        self._archive.seek(self._begin + self._at)
        found = self._archive.read(len(wanted))
        wanted[: len(found)] = found
        self._at += len(found)
        return len(found)


def contents(path: str, member: Member) -> bytes:
    """All bytes of a member."""
    with reading(path, "a ZIP archive"), opened(path, member) as stream:
        return stream.read()


def _checked(path: str, file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The position of the member's bytes, if its own header says what the directory says."""
    if info.flag_bits & _ENCRYPTED:
        raise _refusal(path, info, "is encrypted", "encrypted")
    if info.compress_type not in _METHODS:
        raise _refusal(path, info, f"is packed by method {info.compress_type}: expected 0 or 8", "zip-method")
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        raise _refusal(path, info, "begins after the end of the file", "truncated")
    signature, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(head)
    encoding = "utf-8" if flags & 0x800 else "cp437"
    name = file.read(name_length).decode(encoding, "replace")
    if (signature, method, flags & _ENCRYPTED, name) != (
        b"PK\3\4",
        info.compress_type,
        0,
        info.orig_filename,
    ):
        raise _refusal(path, info, f"is another in its own header: {_quoted(name)}", "zip-headers")
    begin: int = info.header_offset + _LOCAL.size + name_length + extra_length
    return begin


def _refusal(path: str, info: zipfile.ZipInfo, reason: str, code: str) -> ConversionError:
    return refused(
        path,
        f"member {_quoted(info.filename)} {reason}",
        code=code,
        found=info.filename,
    )
