"""The lease of a directory: one process at a time writes to it, on any machine.

A lease is a file with a number, which is made only if no file has that name. It names the process that holds
it, and the process touches it every few seconds. Locks of the system are not used, since network file systems
do not always have them. Another process takes the next number if the holder is dead, or has not
touched its file for a minute. Both times are the file server's, so clocks of machines may differ.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import sys
import threading
import time
from contextlib import suppress
from secrets import token_hex
from socket import gethostname
from typing import NamedTuple

from ingot._base.text import _escaped, located
from ingot._native import replace_file
from ingot.errors import StorageError

#: Seconds between two touches.
RENEW_SECONDS = 10.0
#: Seconds after which a lease that was not touched has expired.
EXPIRE_SECONDS = 60.0
# Python's JSON parser accepts Infinity.
_MOST_SECONDS = 600.0
_PAUSE_SECONDS = 0.05
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEASE = re.compile(r"\.ingot-lease-([0-9]{1,18})\.json")
# And their temporary files.
_NEW = re.compile(r"\.{1,2}ingot-lease-[0-9a-f]{16}\.new(\.[0-9a-f]+\.ingot-tmp)?")


class Holder(NamedTuple):
    """A process that holds a lease, as its file names it.

    Attributes
    ----------
    token : str
        Random digits, which no other lease has.
    host : str
        The name of the machine.
    boot : str
        The boot of the machine and the namespace of processes, in which `process` is unique. May be empty.
    process : int
        The process.
    started : str
        The time at which the process started, as the system counts it. May be empty.
    seconds : float
        The lease expires if it is not touched for this long.
    """

    token: str
    host: str
    boot: str
    process: int
    started: str
    seconds: float


class Lease:
    """The lease of a directory, for one object of this process.

    Parameters
    ----------
    directory : str
        The directory, which exists when the lease is acquired.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = ""
        self._token = ""
        self._owner = 0
        self._end = threading.Event()

    def acquire(self) -> bool:
        """Take the lease unless this object has it. Returns whether it is new.

        Raises
        ------
        StorageError
            Another process has it (``code`` is ``"busy"``), or had it in between (``"lease-lost"``), or the
            lease cannot be written (``"lease"``).
        """
        if self._path and self._owner == os.getpid():
            self.check()
            return False
        try:
            while not self._try():
                # Two processes that saw each other both try again.
                time.sleep(random.uniform(0, _PAUSE_SECONDS))
            self._clean()
            self._keep()
        except BaseException as fault:
            # Ctrl-C may arrive when the file exists.
            self.release()
            if not isinstance(fault, OSError) or (isinstance(fault, StorageError) and fault.code == "busy"):
                raise
            reason = f"could not take the lease of the directory: {fault.strerror or fault}"
            if fault.errno in _FULL:
                reason += ": remove the directory of a step to make room"
            raise located(
                StorageError, reason, errno=fault.errno, code="lease", path=self._directory
            ) from fault
        return True

    def _keep(self) -> None:
        """Start the thread that renews the lease."""
        self._end = threading.Event()
        thread = threading.Thread(
            target=_renew, args=(self._path, self._end), name="ingot-lease", daemon=True
        )
        # At exit there are no new threads, and not much left to write.
        with suppress(RuntimeError):
            thread.start()

    def _try(self) -> bool:
        """Take the next number, unless another process holds the lease. Returns whether it was possible."""
        token = token_hex(8)
        new = os.path.join(self._directory, f".ingot-lease-{token}.new")
        process = os.getpid()
        holder = held_here()._replace(token=token)
        free: dict[int, str] = {}
        try:
            replace_file(new, [json.dumps(holder._asdict()).encode()], durable=False)
            free = {number: self._freed(number, new) for number in self._numbers()}
            self._path = self._named(max(free, default=0) + 1)
            self._token, self._owner = token, process
            _link(new, self._path)
        except (FileExistsError, FileNotFoundError):
            if not os.path.isdir(self._directory):
                raise
            # A file server that repeats a request reports the file that it has made.
            if not self.is_held():
                # Another process was faster, or has removed `new` after it took the lease.
                self._path = ""
                return False
        finally:
            with suppress(FileNotFoundError):
                os.remove(new)
        for number in self._numbers():
            other = self._named(number)
            if other != self._path and _token(other) not in (free.get(number), ""):
                self.release()
                return False
        for number in free:
            with suppress(FileNotFoundError):
                os.remove(self._named(number))
        return True

    def _freed(self, number: int, new: str) -> str:
        """Wait until a lease has expired, and return its token. Raise if its holder is alive."""
        path = self._named(number)
        first: float | None = None
        while True:
            try:
                touched, holder = os.stat(path).st_mtime, _holder(path)
            except FileNotFoundError:
                return ""
            os.utime(new)
            age = os.stat(new).st_mtime - touched
            alive = None if holder is None else is_alive(holder)
            token, seconds = ("", EXPIRE_SECONDS) if holder is None else (holder.token, holder.seconds)
            if alive is False or age > seconds:
                return token
            first = touched if first is None else first
            if alive or touched != first:
                raise busy(self._directory, holder, os.path.basename(path))
            time.sleep(_PAUSE_SECONDS)

    def is_held(self) -> bool:
        """Return whether this object still has the lease that it took."""
        return bool(self._path) and self._owner == os.getpid() and _token(self._path) == self._token

    def check(self) -> None:
        """Raise `StorageError` if another process has taken the lease (``code`` is ``"lease-lost"``)."""
        if self.is_held():
            return
        if os.path.isdir(self._directory) and self._numbers():
            reason = "another process has taken the lease of the directory, since this one did not renew it"
            way_out = "stop one of the two"
        else:
            reason = (
                "the file of the lease is gone: it was removed, or another process had the lease meanwhile"
            )
            way_out = "end the with block, and call load() in a new one"
        raise located(StorageError, f"{reason}: {way_out}", code="lease-lost", path=self._directory)

    def release(self) -> None:
        """Remove the lease, if this object and this process hold it."""
        if not self._path or self._owner != os.getpid():
            return
        self._end.set()
        with suppress(OSError):
            if self.is_held():
                os.remove(self._path)
        self._path = ""

    def _numbers(self) -> list[int]:
        matches = map(_LEASE.fullmatch, os.listdir(self._directory))
        return sorted(int(match[1]) for match in matches if match)

    def _named(self, number: int) -> str:
        return os.path.join(self._directory, f".ingot-lease-{number}.json")

    def _clean(self) -> None:
        """Remove files of processes that were killed while they took the lease. Others try again."""
        for name in os.listdir(self._directory):
            if _NEW.fullmatch(name):
                with suppress(OSError):
                    os.remove(os.path.join(self._directory, name))


def _renew(path: str, end: threading.Event) -> None:
    while not end.wait(RENEW_SECONDS):
        try:
            os.utime(path)
        except FileNotFoundError:
            return
        except OSError:
            # The file server may answer the next time.
            continue


def _link(new: str, path: str) -> None:
    """Make the file `path` with the content of `new`. Raises `FileExistsError` if it exists."""
    try:
        os.link(new, path)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        # A file system without hard links.
        with open(new, "rb") as file, open(path, "xb") as lease:
            lease.write(file.read())


def held_here() -> Holder:
    """Return this process as the holder of a new lease."""
    process = os.getpid()
    return Holder(token_hex(8), gethostname(), _boot(), process, _started(process), EXPIRE_SECONDS)


def _holder(path: str) -> Holder | None:
    """Return the holder that a lease names. None while it is being written."""
    with open(path, "rb") as file:
        return holder_in(file.read(4096))


def holder_in(text: bytes) -> Holder | None:
    """Return the holder in the content of a lease. None if the content is invalid."""
    try:
        content = json.loads(text)
        found = Holder(**{name: content[name] for name in Holder._fields})
        return found._replace(process=int(found.process), seconds=min(_MOST_SECONDS, float(found.seconds)))
    except (ValueError, LookupError, TypeError, OverflowError):
        return None


def _token(path: str) -> str:
    """Return the token of a lease. Empty if the file is missing or invalid."""
    try:
        holder = _holder(path)
    except FileNotFoundError:
        return ""
    return "" if holder is None else holder.token


def busy(directory: str, holder: Holder | None, name: str) -> StorageError:
    """Return the error for a lease of another process, whose file has the name `name`."""
    if holder is not None and _is_here(holder) and holder.process == os.getpid():
        reason = (
            "another Checkpoints of this program saves here: end its with block, or save with that object"
        )
        return located(StorageError, reason, code="busy", path=directory)
    owner = "another process"
    if holder is not None:
        owner = f"process {holder.process} on {_escaped(holder.host)}"
    way_out = f"stop it, or remove {name} if it is not running; ranks save together after "
    way_out += "torch.distributed.init_process_group"
    return located(StorageError, f"{owner} saves checkpoints here: {way_out}", code="busy", path=directory)


def _is_here(holder: Holder) -> bool:
    """Return whether the numbers of the holder's processes are this system's."""
    return holder.host == gethostname() and holder.boot == _boot()


def is_alive(holder: Holder) -> bool | None:
    """Return whether the holder runs. None if it runs elsewhere, or on a system without a way to find out."""
    if not _is_here(holder):
        return None
    if not holder.boot and sys.platform == "win32":
        # On Windows, `os.kill` with signal 0 would end the process.
        return True if holder.process == os.getpid() else None
    # The option hidepid of /proc hides processes of other users.
    started = _started(holder.process) if holder.started else ""
    if started:
        return started == holder.started
    try:
        os.kill(holder.process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _boot() -> str:
    """Return the boot of this machine and the namespace of its processes. Empty if it is not Linux."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> str:
    """Return the time at which a process started, or "dead" for a zombie. Empty if it cannot be read."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in brackets, may have spaces and brackets in it.
            state, *rest = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "dead" if state in ("Z", "X") else rest[18]
