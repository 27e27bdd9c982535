"""A child process whose parent decides on each of its system calls: pass, fail, or kill the child.

It uses seccomp notifications, which deliver all calls in their order; a fault costs one fork. strace is not
used, since it counts calls per thread and needs a new process for each of thousands of faults. `LD_PRELOAD`
is not used, since rustix makes its calls without libc.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The traced calls, by name: the number on x86-64, and the arguments that name their target. `fd`
# is a descriptor, `path` a path, `at` a path below the descriptor before it.
CALLS: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {
    "read": (0, (("fd", 0),)),
    "write": (1, (("fd", 0),)),
    "open": (2, (("path", 0),)),
    "stat": (4, (("path", 0),)),
    "fstat": (5, (("fd", 0),)),
    "lstat": (6, (("path", 0),)),
    "lseek": (8, (("fd", 0),)),
    "mmap": (9, (("fd", 4),)),
    "ioctl": (16, (("fd", 0),)),
    "pread64": (17, (("fd", 0),)),
    "pwrite64": (18, (("fd", 0),)),
    "readv": (19, (("fd", 0),)),
    "writev": (20, (("fd", 0),)),
    "access": (21, (("path", 0),)),
    "sendfile": (40, (("fd", 0), ("fd", 1))),
    "clone": (56, ()),
    "flock": (73, (("fd", 0),)),
    "fsync": (74, (("fd", 0),)),
    "fdatasync": (75, (("fd", 0),)),
    "truncate": (76, (("path", 0),)),
    "ftruncate": (77, (("fd", 0),)),
    "rename": (82, (("path", 0), ("path", 1))),
    "mkdir": (83, (("path", 0),)),
    "rmdir": (84, (("path", 0),)),
    "creat": (85, (("path", 0),)),
    "link": (86, (("path", 0), ("path", 1))),
    "unlink": (87, (("path", 0),)),
    "symlink": (88, (("path", 1),)),
    "readlink": (89, (("path", 0),)),
    "chmod": (90, (("path", 0),)),
    "fchmod": (91, (("fd", 0),)),
    "fchown": (93, (("fd", 0),)),
    "statfs": (137, (("path", 0),)),
    "fstatfs": (138, (("fd", 0),)),
    "fsetxattr": (190, (("fd", 0),)),
    "getxattr": (191, (("path", 0),)),
    "fgetxattr": (193, (("fd", 0),)),
    "listxattr": (194, (("path", 0),)),
    "flistxattr": (196, (("fd", 0),)),
    "getdents64": (217, (("fd", 0),)),
    "fadvise64": (221, (("fd", 0),)),
    "openat": (257, (("at", 1),)),
    "mkdirat": (258, (("at", 1),)),
    "newfstatat": (262, (("at", 1),)),
    "unlinkat": (263, (("at", 1),)),
    "renameat": (264, (("at", 1), ("at", 3))),
    "linkat": (265, (("at", 1), ("at", 3))),
    "symlinkat": (266, (("at", 2),)),
    "readlinkat": (267, (("at", 1),)),
    "fchmodat": (268, (("at", 1),)),
    "faccessat": (269, (("at", 1),)),
    "splice": (275, (("fd", 0), ("fd", 2))),
    "sync_file_range": (277, (("fd", 0),)),
    "utimensat": (280, (("at", 1),)),
    "fallocate": (285, (("fd", 0),)),
    "preadv": (295, (("fd", 0),)),
    "pwritev": (296, (("fd", 0),)),
    "syncfs": (306, (("fd", 0),)),
    "renameat2": (316, (("at", 1), ("at", 3))),
    "copy_file_range": (326, (("fd", 0), ("fd", 2))),
    "preadv2": (327, (("fd", 0),)),
    "pwritev2": (328, (("fd", 0),)),
    "statx": (332, (("at", 1),)),
    "clone3": (435, ()),
    "openat2": (437, (("at", 1),)),
    "faccessat2": (439, (("at", 1),)),
}
#: An `openat` of a directory, which no signal interrupts.
OPENDIR = "openat of a directory"
NAMES = {number: name for name, (number, _) in CALLS.items()}

AUDIT_ARCH_X86_64 = 0xC000003E
BPF_LOAD, BPF_JUMP_IF_EQUAL, BPF_JUMP_IF_SET, BPF_RETURN = 0x20, 0x15, 0x45, 0x06
MAP_ANONYMOUS, FLAGS_OF_MMAP = 0x20, 16 + 3 * 8
RET_USER_NOTIF, RET_ALLOW = 0x7FC00000, 0x7FFF0000
PR_SET_NO_NEW_PRIVS = 38
SYS_SECCOMP, SET_MODE_FILTER, NEW_LISTENER = 317, 1, 1 << 3
NOTIF_RECV, NOTIF_SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
AT_FDCWD = -100

#: A decision instead of an errno: kill the child before the call.
KILL = -1
#: Decides on a call by its name, its number among calls of that name, and its number among all calls. Returns
#: 0 to let it pass, an errno to make it fail, or `KILL`.
Decide = Callable[[str, int, int], int]
#: Looks at a call before it is made: its name, the thread that makes it, and its arguments.
See = Callable[[str, int, list[int]], None]


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    #: As `os.waitstatus_to_exitcode` returns it.
    code: int
    #: The result of its work, or None if it did not finish.
    said: Any
    #: The names of its calls in the folder, in their order.
    calls: list[str]


def is_possible() -> bool:
    """Return whether this machine supports it."""
    return (
        sys.platform == "linux" and os.uname().machine == "x86_64" and supervised(int, Path("/")) is not None
    )


def supervised(
    work: Callable[[], object],
    folder: Path,
    decide: Decide = lambda *call: 0,
    patience: float = 60,
    see: See = lambda *call: None,
) -> Ended | None:
    """Run `work` in a child, and see and decide on each call on `folder`, also of its threads.

    This process must have no other threads, and the child's working directory is its own. None where the
    system does not allow it. A child that makes no call for `patience` seconds is killed.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work(work, theirs, writing)
    theirs.close()
    os.close(writing)
    try:
        with ours:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        calls = _serve(descriptors[0], child, os.fspath(folder), decide, patience, see) if descriptors else []
        with os.fdopen(reading) as said:
            text = said.read()
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, json.loads(text) if text else None, calls) if descriptors else None


def _work(work: Callable[[], object], theirs: socket.socket, writing: int) -> None:
    code = 1
    try:
        listener = _listener()
        if listener >= 0:
            socket.send_fds(theirs, [b"x"], [listener])
            os.close(listener)
        theirs.close()
        if listener >= 0:
            os.write(writing, json.dumps(work()).encode())
        code = 0
    finally:
        os._exit(code)


def _listener() -> int:
    """Make all calls of this process wait for a decision. Return the descriptor for the answers."""
    steps = [(BPF_LOAD, 0, 0, 4), (BPF_JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH_X86_64), (BPF_RETURN, 0, 0, RET_ALLOW)]
    steps.append((BPF_LOAD, 0, 0, 0))
    # Memory without a file is allowed: the child allocates some before its parent can answer.
    steps += [(BPF_JUMP_IF_EQUAL, 0, 4, CALLS["mmap"][0]), (BPF_LOAD, 0, 0, FLAGS_OF_MMAP)]
    steps += [(BPF_JUMP_IF_SET, 0, 1, MAP_ANONYMOUS), (BPF_RETURN, 0, 0, RET_ALLOW), (BPF_LOAD, 0, 0, 0)]
    for number in NAMES:
        steps += [(BPF_JUMP_IF_EQUAL, 0, 1, number), (BPF_RETURN, 0, 0, RET_USER_NOTIF)]
    steps.append((BPF_RETURN, 0, 0, RET_ALLOW))
    rules = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(rules)))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return int(libc.syscall(SYS_SECCOMP, SET_MODE_FILTER, NEW_LISTENER, program))


def _serve(listener: int, child: int, folder: str, decide: Decide, patience: float, see: See) -> list[str]:
    """Answer until the child is gone."""
    calls: list[str] = []
    counts: dict[str, int] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while True:
            events = poll.poll(patience * 1000)
            if not events:
                os.kill(child, signal.SIGKILL)
            elif not events[0][1] & select.POLLIN:
                return calls
            else:
                _answer(listener, child, folder, decide, see, calls, counts)
    finally:
        os.close(listener)


def _answer(
    listener: int,
    child: int,
    folder: str,
    decide: Decide,
    see: See,
    calls: list[str],
    counts: dict[str, int],
) -> None:
    asked = bytearray(80)
    try:
        fcntl.ioctl(listener, NOTIF_RECV, asked)
    except FileNotFoundError:
        # The caller was killed.
        return
    number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", asked)
    name, verdict = NAMES[call], 0
    if name == "openat" and arguments[2] & os.O_DIRECTORY:
        name = OPENDIR
    if _touches(name, pid, arguments, folder):
        calls.append(name)
        see(name, pid, arguments)
        counts[name] = counts.get(name, 0) + 1
        verdict = decide(name, counts[name], len(calls))
    if verdict == KILL:
        os.kill(child, signal.SIGKILL)
        return
    answer = struct.pack("=Qqii", number, 0, -verdict, 0 if verdict else CONTINUE)
    try:
        fcntl.ioctl(listener, NOTIF_SEND, answer)
    except FileNotFoundError:
        return


FICLONE = 0x40049409


def _touches(name: str, pid: int, arguments: list[int], folder: str) -> bool:
    if name == "ioctl" and arguments[1] != FICLONE:
        return False
    of = CALLS["openat" if name == OPENDIR else name][1]
    # A call without a target, such as the start of a thread, always counts.
    return not of or any(argument_path(kind, at, pid, arguments).startswith(folder) for kind, at in of)


def argument_path(kind: str, at: int, pid: int, arguments: list[int]) -> str:
    """Return the path of an argument, or nothing if it is no file."""
    if kind == "fd":
        return descriptor_path(pid, arguments[at])
    text = _text(pid, arguments[at])
    if text.startswith("/"):
        return text
    below = arguments[at - 1] if kind == "at" else AT_FDCWD
    return f"{descriptor_path(pid, below)}/{text}"


def descriptor_path(pid: int, descriptor: int) -> str:
    number = ctypes.c_int(descriptor & 0xFFFFFFFF).value
    try:
        return os.readlink(f"/proc/{pid}/cwd" if number == AT_FDCWD else f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def _text(pid: int, address: int) -> str:
    """Return the bytes up to a zero at this address of the process."""
    found = b""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            while b"\0" not in found and len(found) < 4096:
                # Up to the end of a page, since the next page may not be mapped.
                start = address + len(found)
                found += os.pread(memory.fileno(), 4096 - start % 4096, start) or b"\0"
    except OSError:
        return ""
    return os.fsdecode(found.partition(b"\0")[0])
