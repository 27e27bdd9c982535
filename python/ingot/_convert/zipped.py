"""Members of ZIP archives, found in the directory at the end after it has been checked.

Two readers of one archive may see different contents if names repeat, if members overlap, if the directory
and a member's own header differ, or if bytes of another archive are before, between or after the members.
Such archives are refused. Encrypted archives are refused too.
"""

from __future__ import annotations

import os
import struct
import zipfile
from contextlib import nullcontext
from io import RawIOBase
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ingot._base.text import _quoted
from ingot.errors import ConversionError

from .limits import OBJECT_NBYTES, reading, refused

if TYPE_CHECKING:
    from .limits import Budget
    from .source import Region

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# A member's own header: signature, version, flags, method, time, date, checksum, two sizes, two lengths.
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x1 | 0x40
# A member may have its checksum and sizes after its bytes; the longest form of that, in bytes.
_HAS_DESCRIPTOR, _DESCRIPTOR_NBYTES = 0x8, 24
# The form of an entry of the directory: the bytes before the name, with three lengths at this position.
_ENTRY_NBYTES, _LENGTHS, _LENGTHS_AT = 46, struct.Struct("<3H"), 28
# The end of the directory: two records of large archives, and the record of all archives.
_END_64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
# The value of numbers that are too large for the last record.
_IN_END_64 = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


class Member(NamedTuple):
    """One file in an archive."""

    name: str
    nbytes: int
    """When it is unpacked."""
    position: int
    """The position of its bytes in the archive."""
    packed_nbytes: int
    """The position in the archive."""
    is_packed: bool
    checksum: int


def members(path: str, budget: Budget | None = None, part: Region | None = None) -> dict[str, Member]:
    """Return all files of the archive at `path`, or in a part of that file, by name.

    Without a budget, the archive is our own.
    """
    found: dict[str, Member] = {}
    begin = 0 if part is None else part.position
    with (
        reading(path, "a ZIP archive"),
        open(path, "rb") as whole,
        nullcontext(whole) if part is None else Window(whole, part) as file,
        zipfile.ZipFile(file) as archive,
    ):
        _check_directory(file, archive.start_dir, len(archive.infolist()))
        end = slack = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            position = _checked(path, file, info)
            packed = info.compress_type != zipfile.ZIP_STORED
            if info.filename in found:
                raise _refusal(path, info, "is in it twice", "duplicate-member")
            if info.header_offset < end:
                raise _refusal(path, info, "overlaps another member", "overlap")
            if info.header_offset > end + slack:
                raise _refusal(path, info, "follows bytes of no member", "zip-headers")
            if not packed and info.file_size != info.compress_size:
                raise _refusal(path, info, "is stored, and has two sizes", "zip-headers")
            end = position + info.compress_size
            slack = _DESCRIPTOR_NBYTES if info.flag_bits & _HAS_DESCRIPTOR else 0
            if not info.is_dir():
                sizes = info.file_size, begin + position, info.compress_size
                found[info.filename] = Member(info.filename, *sizes, packed, info.CRC)
        if end > archive.start_dir:
            raise refused(path, "a member reaches into the directory of the archive", "overlap")
        if end + slack < archive.start_dir:
            raise refused(path, "the directory follows bytes of no member", "zip-headers")
    if budget is not None:
        budget.hold(len(found) * OBJECT_NBYTES)
        # Stored members take as many bytes in the file.
        budget.unpack(sum(member.nbytes for member in found.values() if member.is_packed))
    return found


def _check_directory(file: IO[bytes] | Window, begin: int, entries: int) -> None:
    """Raise unless the directory that starts at `begin` is the only one, and ends the file."""
    file.seek(begin)
    for _ in range(entries):
        fixed = file.read(_ENTRY_NBYTES)
        file.seek(sum(_LENGTHS.unpack_from(fixed, _LENGTHS_AT)), os.SEEK_CUR)
    end = file.tell()
    expected = (0, 0, entries, entries, end - begin, begin)
    tail = file.read(_END_64.size + _LOCATOR.size + _END.size)
    is_one = True
    if tail.startswith(b"PK\6\6"):
        locator = _LOCATOR.unpack_from(tail, _END_64.size)
        is_one = _END_64.unpack_from(tail)[4:] == expected and locator == (b"PK\6\7", 0, end, 1)
        end += _END_64.size + _LOCATOR.size
        tail = tail[_END_64.size + _LOCATOR.size :]
    signature, *numbers, comment = _END.unpack_from(tail)
    is_same = all(one in others for one, *others in zip(numbers, expected, _IN_END_64, strict=True))
    if not is_one or signature != b"PK\5\6" or not is_same:
        raise ValueError("it has two directories, or is in several files")
    if file.seek(0, os.SEEK_END) != end + _END.size + comment:
        raise ValueError("bytes follow its directory")


def _checked(path: str, file: IO[bytes] | Window, info: zipfile.ZipInfo) -> int:
    """Return the position of the member's bytes, if its own header agrees with the directory."""
    if info.flag_bits & _ENCRYPTED:
        raise _refusal(path, info, "is encrypted", "encrypted")
    if info.compress_type not in _METHODS:
        raise _refusal(path, info, f"is packed by method {info.compress_type}: expected 0 or 8", "zip-method")
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        raise _refusal(path, info, "begins after the end of the file", "truncated")
    signature, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(head)
    name = file.read(name_length).decode("utf-8" if flags & 0x800 else "cp437", "replace")
    expected = (b"PK\3\4", info.compress_type, 0, info.orig_filename)
    if (signature, method, flags & _ENCRYPTED, name) != expected:
        raise _refusal(path, info, f"differs in its own header: {_quoted(name)}", "zip-headers")
    begin: int = info.header_offset + _LOCAL.size + name_length + extra_length
    return begin


def _refusal(path: str, info: zipfile.ZipInfo, reason: str, code: str) -> ConversionError:
    return refused(path, f"member {_quoted(info.filename)} {reason}", code, found=info.filename)


def opened(path: str, member: Member, *, may_lack_checksum: bool = False) -> IO[bytes]:
    """Open a member at its begin. The directory, which may be long, is not read again.

    With `may_lack_checksum`, a checksum of 0 means that the writer computed none.
    """
    info = zipfile.ZipInfo(member.name)
    info.compress_type = zipfile.ZIP_DEFLATED if member.is_packed else zipfile.ZIP_STORED
    info.compress_size, info.file_size = member.packed_nbytes, member.nbytes
    # zipfile skips the comparison if the entry has no checksum.
    if member.checksum or not may_lack_checksum:
        info.CRC = member.checksum
    # The stream closes it.
    file = open(path, "rb")  # noqa: SIM115
    file.seek(member.position)
    stream: Any = zipfile.ZipExtFile(file, "r", info, None, True)
    return stream  # type: ignore[no-any-return]


def contents(path: str, member: Member, *, may_lack_checksum: bool = False) -> bytes:
    """Return all bytes of a member."""
    with reading(path, "a ZIP archive"), opened(path, member, may_lack_checksum=may_lack_checksum) as stream:
        return stream.read()


class Window(RawIOBase):
    """A stored member or another part of a file, read in any order. No checksum is compared."""

    def __init__(self, archive: IO[bytes], member: Member | Region) -> None:
        self._archive = archive
        self._begin, self._nbytes, self._at = member.position, member.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max({os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(self._nbytes - self._at, 0)]
        self._archive.seek(self._begin + self._at)
        found = self._archive.read(len(wanted))
        wanted[: len(found)] = found
        self._at += len(found)
        return len(found)
