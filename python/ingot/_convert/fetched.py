"""A source behind a URL or in an object, of which a copy is here for as long as it is read."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING

from ingot._base.progress import told
from ingot._base.text import _escaped
from ingot._native import shown_url
from ingot._read.source import Reader, shown
from ingot._write.directory.hidden import hidden
from ingot._write.download import download
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot.typing import Buffer, StorageOptions, Tell

_ENDING = ".fetched"
# Concurrent conversions to one destination whose leftovers are found.
_AT_ONCE = 8
# Characters of a name. File systems have room for 255 bytes.
_LONGEST = 60


@contextmanager
def fetched(
    url: str, beside: str, progress: bool | Tell, storage_options: StorageOptions | None
) -> Iterator[str]:
    """Give the path of a copy, in a folder of its own beside a destination, which is gone in the end."""
    with _folder(beside, shown_url(url)) as folder:
        copy = download(
            url, folder + os.sep, progress=progress, durable=False, storage_options=storage_options
        )
        yield copy.path


@contextmanager
def copied(found: Reader | Buffer, beside: str, progress: bool | Tell) -> Iterator[str]:
    """As `fetched`, of what an object or a buffer holds."""
    parts, nbytes = (found.parts(), found.nbytes) if isinstance(found, Reader) else _whole(found)
    # Its ending may tell what it is.
    name = os.path.basename(shown(found).partition("?")[0].replace("\0", ""))[-_LONGEST:] or "source"
    with _folder(beside, shown(found)) as folder:
        path = os.path.join(folder, name)
        with open(path, "xb") as file, told(progress, f"Fetching {_escaped(name)}") as tell:
            for part in parts:
                file.write(part)
                if tell is not None:
                    tell(file.tell(), nbytes)
        yield path


def _whole(buffer: Buffer) -> tuple[list[memoryview], int]:
    view = memoryview(buffer)
    return [view], view.nbytes


@contextmanager
def _folder(beside: str, name_of_source: str) -> Iterator[str]:
    """Give a folder for a copy of what has this name."""
    # There is room for what comes of it; where the system keeps temporary files, there may be none.
    prefix, folder = _made(beside)
    with hidden(prefix):
        try:
            with _in_use(folder):
                yield folder
        except ConversionError as error:
            error.add_note(f"fetched from {_escaped(name_of_source)}, and no other file with it")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _made(beside: str) -> tuple[str, str]:
    """Make a folder, and return what its name begins with and its path."""
    for number in count():
        prefix, folder = _named(beside, number)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            return prefix, folder
    raise AssertionError("one of the names is free")


def _named(beside: str, number: int) -> tuple[str, str]:
    """Return a prefix for hidden names, and the path of a folder beside a destination that begins with it.

    The names are known, so that a directory need not be listed to find what a killed conversion left.
    """
    directory, name = os.path.split(os.path.realpath(beside))
    prefix = f".ingot-{number:08x}."
    return prefix, os.path.join(directory, prefix + name + _ENDING)


def sweep(beside: str) -> None:
    """Remove what conversions to this destination fetched that were killed."""
    for number in range(_AT_ONCE):
        _, folder = _named(beside, number)
        with suppress(OSError):
            with _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
            # Windows keeps the folder as long as the lock in it is open.
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _in_use(folder: str) -> Iterator[None]:
    """Lock a folder, until the process ends however it does. `OSError` where another has the lock."""
    if sys.platform == "win32":
        # A folder cannot be locked there, but a file in it, which vanishes when it is closed.
        import msvcrt

        descriptor = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_TEMPORARY)
    else:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
