"""A directory with a checkpoint: its lock, hidden files and files of parts.

Only one save at a time writes a checkpoint there.

The lock is on a file in the directory, which exists as long as the save. A process that is killed leaves the
file without a lock. On a file system without locks, the file itself is the lock, and another process takes it
only if the process that it names does not run any more.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from socket import gethostname
from threading import Lock

from ingot._base.text import _escaped, located
from ingot._native import replace_file
from ingot.errors import CheckpointError, StorageError

#: The name of the file.
NAME = ".ingot-saving.lock"
#: The time in seconds for which a save waits for others. It starts again whenever another process gets the
#: lock.
WAIT_SECONDS = 60.0
_PAUSE_SECONDS = 0.02
# On Windows no other process can read a locked byte, so the byte after the text is locked.
_LOCKED_BYTE = 1 << 30
_HELD_ELSEWHERE = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class _Held:
    """The open lock files of this process, by directory."""

    def __init__(self) -> None:
        self.guard = Lock()
        self.descriptors: dict[str, int] = {}

    def forget(self) -> None:
        """Close the parent's files in the child of a fork, which has no part in the parent's saves."""
        descriptors, self.descriptors, self.guard = self.descriptors, {}, Lock()
        for descriptor in descriptors.values():
            with suppress(OSError):
                os.close(descriptor)


_HELD = _Held()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HELD.forget)


@contextmanager
def locked(directory: str, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock of a directory, which is made if another save has removed it.

    Raises
    ------
    StorageError
        Another save has held the lock for `seconds`, by default `WAIT_SECONDS` (``code`` is ``"busy"``), or
        locking or writing the lock file failed (``"write"``).
    OSError
        The lock file cannot be made.
    """
    key = os.path.realpath(directory)
    _acquire(directory, key, WAIT_SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        if is_held(directory):
            _release(os.path.join(directory, NAME), key)


def is_held(directory: str) -> bool:
    """Return whether this process holds the lock of a directory. The child of a fork does not."""
    return os.path.realpath(directory) in _HELD.descriptors


def _acquire(directory: str, key: str, seconds: float) -> None:
    until, owner = time.monotonic() + seconds, ""
    while True:
        if _try(directory, key):
            return
        found = _owner(os.path.join(directory, NAME))
        if found != owner and owner:
            until = time.monotonic() + seconds
        owner = found
        if time.monotonic() >= until:
            busy = f"another save to this directory is under way{f' ({_escaped(owner)})' if owner else ''}"
            way_out = f"save to another directory, or remove {NAME} if no save is running"
            reason = f"{busy}: waited {seconds:g} s for it to end: {way_out}"
            raise located(StorageError, reason, code="busy", path=directory)
        time.sleep(_PAUSE_SECONDS)


def _try(directory: str, key: str) -> bool:
    """Take the lock. Returns False if another save holds it."""
    path = os.path.join(directory, NAME)
    with _HELD.guard:
        if key in _HELD.descriptors:
            return False
        descriptor, is_new = _open(path)
        try:
            is_ours = _lock(descriptor)
            if is_ours is None:
                is_ours = is_new or _take_over(path)
            if is_ours and _is_there(path, descriptor):
                _write_owner(descriptor)
                _HELD.descriptors[key] = descriptor
                return True
        except BaseException as fault:
            if is_new:
                with suppress(OSError):
                    os.remove(path)
            os.close(descriptor)
            if isinstance(fault, OSError):
                raise _not_locked(directory, fault) from fault
            raise
        os.close(descriptor)
        return False


def _not_locked(directory: str, fault: OSError) -> StorageError:
    reason = f"could not lock the directory: {fault.strerror}"
    return located(StorageError, reason, errno=fault.errno, code="write", path=directory)


def _open(path: str) -> tuple[int, bool]:
    """Open the lock file. Returns whether it is new."""
    flags = (
        os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NOINHERIT", 0)
    )
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            pass
        except FileNotFoundError:
            # A save that failed has removed the directory that it made.
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        with suppress(FileNotFoundError):
            return os.open(path, flags), False


def _lock(descriptor: int) -> bool | None:
    """Lock the file. Returns False if another process has the lock, None if the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _HELD_ELSEWHERE:
            return False
        if fault.errno in _NO_LOCKS:
            return None
        raise
    return True


def _take_over(path: str) -> bool:
    """On a file system without locks, remove the file of a process that has ended, for the next attempt."""
    owner = _owner(path).split()
    if len(owner) == 4 and owner[3] == gethostname() and not _is_alive(int(owner[1])):
        with suppress(OSError):
            os.remove(path)
    return False


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        # Nothing in this process holds the lock.
        return False
    if sys.platform == "win32":
        # On Windows, signal 0 would end the process.
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_there(path: str, descriptor: int) -> bool:
    """Return whether the path still names the open file. A save removes it while others wait for the lock."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _write_owner(descriptor: int) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {gethostname()}".encode())


def _owner(path: str) -> str:
    """Return the process that holds the lock, as the file names it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(200)
    except OSError:
        return ""


def _release(path: str, key: str) -> None:
    with _HELD.guard:
        descriptor = _HELD.descriptors.pop(key)
    try:
        if sys.platform != "win32":
            # The name is removed before the lock is released, so that a save that locks the file later
            # detects this.
            with suppress(OSError):
                os.remove(path)
    finally:
        _unlock(descriptor)
    if sys.platform == "win32":
        # The file stays if another save has opened it in the meantime.
        with suppress(OSError):
            os.remove(path)


def _unlock(descriptor: int) -> None:
    if sys.platform != "win32":
        import fcntl

        # Closing the file does not release the lock if a child of a fork has it open too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def new_folders(path: str, durable: bool) -> Iterator[None]:
    """Flush the names of missing directories of `path` that the block makes, if `durable`.

    If the block raises, those that are empty are removed.
    """
    missing: list[str] = []
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in missing:
                os.rmdir(folder)
        raise
    if durable:
        for folder in missing:
            # A directory that may not be read cannot be flushed.
            with suppress(PermissionError):
                _flush_name(folder)


def make(directory: str, durable: bool) -> None:
    """Make a directory and those above it that are missing, and flush their names if `durable`."""
    with new_folders(directory, durable):
        os.makedirs(directory, exist_ok=True)


def _flush_name(folder: str) -> None:
    try:
        flush_names(os.path.dirname(folder))
    except PermissionError:
        raise
    except OSError as fault:
        reason = f"could not flush its directory, though it is written: {fault.strerror}"
        raise located(StorageError, reason, code="write", path=folder, errno=fault.errno) from fault


def flush_names(directory: str) -> None:
    """Flush the names in a directory to the disk."""
    # Windows flushes no directories.
    if os.name == "nt":
        return
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# The names of temporary files.


PREFIX = re.compile(r"\.ingot-[0-9a-f]{8}\.")


def new_prefix() -> str:
    """Return a new prefix for the names of temporary files."""
    return f".ingot-{token_hex(4)}."


@contextmanager
def hidden(prefix: str | None = None) -> Iterator[str]:
    """Yield a prefix for temporary names, which the final name follows.

    Errors raised in the block have the final name in place of the temporary one.
    """
    prefix = prefix or new_prefix()
    with called(prefix, ""):
        yield prefix


@contextmanager
def called(hidden: str, shown: str) -> Iterator[None]:
    """Replace `hidden` by `shown` in errors that are raised in the block."""
    try:
        yield
    except Exception as fault:
        _call(hidden, shown, fault)
        raise


def _call(hidden: str, shown: str, fault: Exception) -> None:
    fault.args = tuple(_with(hidden, shown, part) for part in fault.args)
    for field in ("path", "filename", "filename2"):
        if isinstance(found := getattr(fault, field, None), (str, bytes)):
            setattr(fault, field, _with(hidden, shown, found))
    if isinstance(fault, OSError) and fault.filename2 is not None and fault.filename == fault.filename2:
        # A rename between the two names: one name is enough.
        del fault.filename2


def _with(hidden: str, shown: str, found: object) -> object:
    if isinstance(found, str):
        return found.replace(hidden, shown)
    return found.replace(os.fsencode(hidden), os.fsencode(shown)) if isinstance(found, bytes) else found


# Files that hold parts of tensors, and their replacement by the files of another save. No index names such
# files: all files in a directory are one checkpoint. So while some of them are replaced, a manifest in the
# directory lists the files of the old checkpoint, under hidden second names. Readers use the manifest if
# there is one. Removing the manifest makes the new files the checkpoint.


#: A file of parts, as torch's Hugging Face storage names them.
PART = re.compile(r"shard-[0-9]{5,}-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
#: The file that names the old checkpoint while it is replaced.
MANIFEST = ".ingot-parts.json"


def listed(directory: str) -> list[str] | None:
    """Return the names that the manifest of a directory lists. None if there is no manifest.

    Raises `CheckpointError` if the old checkpoint has been lost, on a file system without hard links.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            names = json.load(file)["files"]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as fault:
        raise _lost(path, f"it cannot be read ({type(fault).__name__})") from None
    if names is None:
        raise _lost(path, "a save that replaced files did not end")
    return [*map(str, names)]


def _lost(path: str, reason: str) -> CheckpointError:
    reason = f"{reason}: the files are not of one checkpoint: save again with overwrite=True"
    return located(CheckpointError, reason, code="invalid-parts", path=path)


def keep(directory: str, old: list[str], durable: bool) -> list[str]:
    """Write the manifest, link the old files to the names that it lists, and return these names."""
    links: list[str] = []
    has_links = True
    with hidden() as prefix:
        try:
            for name in old:
                os.link(os.path.join(directory, name), os.path.join(directory, prefix + name))
                links.append(prefix + name)
        except OSError:
            # Without hard links, the old checkpoint is lost if this process is killed from here on.
            has_links = False
        beside = os.path.join(directory, prefix + MANIFEST)
        manifest = json.dumps({"files": links if has_links else None})
        replace_file(beside, [manifest.encode()], durable=durable)
        os.replace(beside, os.path.join(directory, MANIFEST))
    return links


def restore(directory: str, links: Iterable[str]) -> list[str]:
    """Rename the files behind `links` to the names without a prefix, and return these names."""
    names = {PREFIX.sub("", link, count=1): link for link in links}
    with hidden() as prefix:
        for name, link in names.items():
            beside = os.path.join(directory, prefix + name)
            os.link(os.path.join(directory, link), beside)
            os.replace(beside, os.path.join(directory, name))
            # If both were one file already, the system leaves both names.
            with suppress(FileNotFoundError):
                os.remove(beside)
    return [*names]


def recover(directory: str) -> None:
    """Restore the names of the old files if a replacement did not end. The caller holds the lock."""
    try:
        links = listed(directory)
    except CheckpointError:
        # Readers reject the directory until a save replaces its files.
        return
    if links is None:
        return
    restored = restore(directory, links)
    for name in os.listdir(directory):
        if PART.fullmatch(name) and name not in restored:
            os.remove(os.path.join(directory, name))
    os.remove(os.path.join(directory, MANIFEST))
