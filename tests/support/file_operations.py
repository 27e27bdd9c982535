"""All operations of a child process that change the files of a folder, in their order, with their bytes.

The operations are seen before they are made. Made again on a model of the folder, they must result in the
folder that the child left: an operation that was not seen, such as a store to a mapping, is a difference.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.supervised import FICLONE, argument_path, descriptor_path, supervised

ROOT = 0
AT_EMPTY_PATH, RENAME_NOREPLACE, RENAME_EXCHANGE = 0x1000, 1, 2
MAP_SHARED, PROT_WRITE = 1, 2
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 1, 2, 16
CURRENT = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Write:
    """Bytes that are written to a file at a position."""

    file: int
    position: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """The end of a file is moved. Bytes between the old and the new end are zero."""

    file: int
    nbytes: int
    #: Whether the file only grows, as by `fallocate`.
    grows: bool = False


@dataclass(frozen=True)
class Names:
    """Names that change together: for each directory and name the file that it then has, or None."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Flush:
    """The data of a file, or the names of a directory, are flushed to the disk; with None all of both."""

    node: int | None


Operation = Write | Resize | Names | Flush


@dataclass
class Folder:
    """The files of a folder by their numbers, and its directories, which map names to numbers."""

    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes | bytearray] = field(default_factory=dict)
    #: The targets of symbolic links.
    links: dict[int, str] = field(default_factory=dict)

    def tree(self, directory: int = ROOT, place: str = "") -> Iterator[tuple[str, int]]:
        """Yield the path and the number of each file that can be reached."""
        for name, node in self.directories[directory].items():
            path = f"{place}{name}"
            if node in self.directories:
                yield from self.tree(node, path + "/")
            else:
                yield path, node

    def contents(self) -> dict[str, bytes]:
        return {path: bytes(self.files[node]) for path, node in self.tree() if node in self.files}

    def copy(self) -> Folder:
        directories = {node: dict(names) for node, names in self.directories.items()}
        return Folder(directories, dict(self.files), self.links)

    def opened(self, node: int) -> bytearray:
        """Return the bytes of a file, to be changed in place."""
        data = self.files.get(node, b"")
        if isinstance(data, bytes):
            data = self.files[node] = bytearray(data)
        return data


@dataclass
class Recording:
    """What was done to a folder."""

    #: The folder before, with the directories and links that were made later, which have no names yet.
    before: Folder
    operations: list[Operation]
    said: object


def recorded(work: Callable[[], object], place: Path) -> Recording:
    """Run `work` in a child and record all changes that it makes to files below `place`.

    Fails if an operation was not seen.
    """
    recorder = Recorder(place)
    ended = supervised(work, place, see=recorder.see)
    assert ended is not None, "the calls of a process cannot be seen here"
    assert ended.code == 0, ended
    assert not recorder.unseen, recorder.unseen
    found = recorder.recording(ended.said)
    expected, real = after(found).contents(), read(place)[0].contents()
    differing = sorted(path for path in expected.keys() | real.keys() if expected.get(path) != real.get(path))
    assert not differing, f"changed by an operation that was not seen: {differing}"
    return found


def read(place: Path) -> tuple[Folder, dict[int, int]]:
    """Return the folder at `place`, and the number of each inode."""
    found, numbers = Folder(), {place.stat().st_ino: ROOT}
    waiting = [(place, ROOT)]
    while waiting:
        path, at = waiting.pop()
        for entry in sorted(os.scandir(path), key=lambda one: one.name):
            node = numbers.setdefault(entry.inode(), len(numbers))
            found.directories[at][entry.name] = node
            if entry.is_symlink():
                found.links[node] = os.readlink(entry.path)
            elif entry.is_dir():
                found.directories[node] = {}
                waiting.append((Path(entry.path), node))
            else:
                found.files[node] = Path(entry.path).read_bytes()
    return found, numbers


def after(recording: Recording) -> Folder:
    """Return the folder after all operations."""
    made = recording.before.copy()
    for operation in recording.operations:
        apply(operation, made)
    return made


def apply(operation: Operation, folder: Folder) -> None:
    """Do this to the folder."""
    if isinstance(operation, Write):
        data = folder.opened(operation.file)
        data.extend(bytes(max(operation.position - len(data), 0)))
        data[operation.position : operation.position + len(operation.data)] = operation.data
    elif isinstance(operation, Resize):
        data = folder.opened(operation.file)
        data.extend(bytes(max(operation.nbytes - len(data), 0)))
        if not operation.grows:
            del data[operation.nbytes :]
    elif isinstance(operation, Names):
        for directory, name, node in operation.changes:
            if node is None:
                folder.directories[directory].pop(name, None)
            else:
                folder.directories[directory][name] = node
                if node not in folder.directories and node not in folder.links:
                    folder.files.setdefault(node, b"")


class Recorder:
    """Turns the calls of a process into operations on numbered files."""

    def __init__(self, place: Path) -> None:
        self.place = os.fspath(place)
        self.before, self.numbers = read(place)
        self.folder = read(place)[0]
        self.count = len(self.numbers)
        self.once_named = {*self.numbers.values()}
        self.operations: list[Operation] = []
        self.unseen: list[str] = []

    def recording(self, said: object) -> Recording:
        self.before.directories = {node: {} for node in self.folder.directories} | self.before.directories
        self.before.links = self.folder.links
        return Recording(self.before, self.operations, said)

    def see(self, name: str, pid: int, arguments: list[int]) -> None:
        """Record a call that is about to be made."""
        try:
            method = getattr(self, f"see_{name.partition(' ')[0]}", None)
            if method is not None:
                method(pid, arguments)
        except (OSError, KeyError, ValueError) as error:
            self.unseen.append(f"{name}: {error!r}")

    # Files and names

    def do(self, operation: Operation) -> None:
        self.operations.append(operation)
        if isinstance(operation, Names):
            self.once_named |= {node for _, _, node in operation.changes if node is not None}
        apply(operation, self.folder)

    def new(self) -> int:
        self.count += 1
        return self.count

    def place_of(self, path: str) -> tuple[int, str] | None:
        """Return the directory and the name of a path, or None if it is outside the folder."""
        path = os.path.normpath(path)
        if not path.startswith(self.place + "/"):
            return None
        *parents, name = path[len(self.place) + 1 :].split("/")
        at = ROOT
        for parent in parents:
            node = self.folder.directories[at].get(parent)
            if node not in self.folder.directories:
                return None
            at = node
        return at, name

    def node(self, path: str) -> int | None:
        if os.path.normpath(path) == self.place:
            return ROOT
        place = self.place_of(path)
        return None if place is None else self.folder.directories[place[0]].get(place[1])

    def is_named(self, node: int) -> bool:
        return any(node in names.values() for names in self.folder.directories.values())

    def of_descriptor(self, pid: int, descriptor: int) -> int | None:
        """Return the number of the open file, or None if it is not in the folder."""
        path = descriptor_path(pid, descriptor)
        if path != self.place and not path.startswith(self.place + "/"):
            return None
        inode = os.stat(f"/proc/{pid}/fd/{descriptor & 0xFFFFFFFF}").st_ino
        known, found = self.numbers.get(inode), self.node(path)
        # The inode of a removed file may come back as another file's, with a name or without.
        is_other = known != found and (found is not None or known in self.once_named)
        if known is None or (is_other and not self.is_named(known)):
            known = self.numbers[inode] = self.new() if found is None else found
            if known not in self.folder.directories:
                self.folder.files.setdefault(known, b"")
        return known

    # Making files

    def opened(self, path: str, flags: int) -> None:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return
        place = self.place_of(path)
        if place is None:
            return
        known = self.folder.directories[place[0]].get(place[1])
        if known is None and flags & os.O_CREAT:
            self.do(Names(((*place, self.new()),)))
        elif known in self.folder.files and flags & os.O_TRUNC and not flags & os.O_EXCL:
            self.do(Resize(known, 0))

    def see_open(self, pid: int, arguments: list[int]) -> None:
        self.opened(argument_path("path", 0, pid, arguments), arguments[1])

    def see_creat(self, pid: int, arguments: list[int]) -> None:
        self.opened(argument_path("path", 0, pid, arguments), os.O_CREAT | os.O_TRUNC)

    def see_openat(self, pid: int, arguments: list[int]) -> None:
        self.opened(argument_path("at", 1, pid, arguments), arguments[2])

    def see_openat2(self, pid: int, arguments: list[int]) -> None:
        (flags,) = struct.unpack("=Q", memory(pid, arguments[2], 8))
        self.opened(argument_path("at", 1, pid, arguments), flags)

    def made(self, path: str, *, target: str | None = None) -> None:
        place = self.place_of(path)
        if place is None or place[1] in self.folder.directories[place[0]]:
            return
        node = self.new()
        if target is None:
            self.folder.directories[node] = {}
        else:
            self.folder.links[node] = target
        self.do(Names(((*place, node),)))

    def see_mkdir(self, pid: int, arguments: list[int]) -> None:
        self.made(argument_path("path", 0, pid, arguments))

    def see_mkdirat(self, pid: int, arguments: list[int]) -> None:
        self.made(argument_path("at", 1, pid, arguments))

    def see_symlink(self, pid: int, arguments: list[int]) -> None:
        self.made(argument_path("path", 1, pid, arguments), target=text(pid, arguments[0]))

    def see_symlinkat(self, pid: int, arguments: list[int]) -> None:
        self.made(argument_path("at", 2, pid, arguments), target=text(pid, arguments[0]))

    # Changing names

    def linked(self, node: int | None, path: str) -> None:
        place = self.place_of(path)
        if node is not None and place is not None and place[1] not in self.folder.directories[place[0]]:
            self.do(Names(((*place, node),)))

    def see_link(self, pid: int, arguments: list[int]) -> None:
        found = self.node(argument_path("path", 0, pid, arguments))
        self.linked(found, argument_path("path", 1, pid, arguments))

    def see_linkat(self, pid: int, arguments: list[int]) -> None:
        source = text(pid, arguments[1])
        if source.startswith(("/proc/self/fd/", f"/proc/{pid}/fd/")):
            found = self.of_descriptor(pid, int(source.rpartition("/")[2]))
        elif not source and arguments[4] & AT_EMPTY_PATH:
            found = self.of_descriptor(pid, arguments[0])
        else:
            found = self.node(argument_path("at", 1, pid, arguments))
        self.linked(found, argument_path("at", 3, pid, arguments))

    def renamed(self, source: str, destination: str, flags: int = 0) -> None:
        one, two = self.place_of(source), self.place_of(destination)
        if one is None or two is None:
            if one or two:
                self.unseen.append(f"a rename across the folder: {source}, {destination}")
            return
        node = self.folder.directories[one[0]].get(one[1])
        other = self.folder.directories[two[0]].get(two[1])
        if node is None or one == two or (other is not None and flags & RENAME_NOREPLACE):
            return
        self.do(Names(((*one, other if flags & RENAME_EXCHANGE else None), (*two, node))))

    def see_rename(self, pid: int, arguments: list[int]) -> None:
        self.renamed(argument_path("path", 0, pid, arguments), argument_path("path", 1, pid, arguments))

    def see_renameat(self, pid: int, arguments: list[int]) -> None:
        self.renamed(argument_path("at", 1, pid, arguments), argument_path("at", 3, pid, arguments))

    def see_renameat2(self, pid: int, arguments: list[int]) -> None:
        paths = argument_path("at", 1, pid, arguments), argument_path("at", 3, pid, arguments)
        self.renamed(*paths, arguments[4])

    def removed(self, path: str) -> None:
        place = self.place_of(path)
        node = None if place is None else self.folder.directories[place[0]].get(place[1])
        # A directory with files stays.
        if place is not None and node is not None and not self.folder.directories.get(node):
            self.do(Names(((*place, None),)))

    def see_unlink(self, pid: int, arguments: list[int]) -> None:
        self.removed(argument_path("path", 0, pid, arguments))

    see_rmdir = see_unlink

    def see_unlinkat(self, pid: int, arguments: list[int]) -> None:
        self.removed(argument_path("at", 1, pid, arguments))

    # Writing

    def wrote(self, pid: int, descriptor: int, data: bytes, position: int | None) -> None:
        node = self.of_descriptor(pid, descriptor)
        if node is None or not data:
            return
        if position is None:
            position = offset(pid, descriptor, len(self.folder.files[node]))
        self.do(Write(node, position, data))

    def see_write(self, pid: int, arguments: list[int]) -> None:
        self.wrote(pid, arguments[0], memory(pid, arguments[1], arguments[2]), None)

    def see_pwrite64(self, pid: int, arguments: list[int]) -> None:
        self.wrote(pid, arguments[0], memory(pid, arguments[1], arguments[2]), arguments[3])

    def see_writev(self, pid: int, arguments: list[int]) -> None:
        self.wrote(pid, arguments[0], vector(pid, arguments), None)

    def see_pwritev(self, pid: int, arguments: list[int]) -> None:
        self.wrote(pid, arguments[0], vector(pid, arguments), arguments[3])

    def see_pwritev2(self, pid: int, arguments: list[int]) -> None:
        position = None if arguments[3] == CURRENT else arguments[3]
        self.wrote(pid, arguments[0], vector(pid, arguments), position)

    def see_copy_file_range(self, pid: int, arguments: list[int]) -> None:
        source, begin, target, at, nbytes, _ = arguments
        start = number(pid, begin) if begin else offset(pid, source, 0)
        with open(f"/proc/{pid}/fd/{source & 0xFFFFFFFF}", "rb", buffering=0) as file:
            data = os.pread(file.fileno(), nbytes, start)
        self.wrote(pid, target, data, number(pid, at) if at else None)

    def see_sendfile(self, pid: int, arguments: list[int]) -> None:
        target, source, begin, nbytes, *_ = arguments
        start = number(pid, begin) if begin else offset(pid, source, 0)
        with open(f"/proc/{pid}/fd/{source & 0xFFFFFFFF}", "rb", buffering=0) as file:
            data = os.pread(file.fileno(), nbytes, start)
        self.wrote(pid, target, data, None)

    def see_splice(self, pid: int, arguments: list[int]) -> None:
        if self.of_descriptor(pid, arguments[2]) is not None:
            self.unseen.append("splice into a file")

    def see_ioctl(self, pid: int, arguments: list[int]) -> None:
        # Only clones are seen. Where the file system cannot clone, the call fails and changes nothing.
        if arguments[1] == FICLONE and clones(self.place):
            self.unseen.append("a clone of a file")

    def see_mmap(self, pid: int, arguments: list[int]) -> None:
        writes = arguments[2] & PROT_WRITE and arguments[3] & MAP_SHARED
        if writes and self.of_descriptor(pid, arguments[4]) is not None:
            self.unseen.append("stores to a shared mapping")

    def see_truncate(self, pid: int, arguments: list[int]) -> None:
        node = self.node(argument_path("path", 0, pid, arguments))
        if node is not None:
            self.do(Resize(node, arguments[1]))

    def see_ftruncate(self, pid: int, arguments: list[int]) -> None:
        node = self.of_descriptor(pid, arguments[0])
        if node is not None:
            self.do(Resize(node, arguments[1]))

    def see_fallocate(self, pid: int, arguments: list[int]) -> None:
        node = self.of_descriptor(pid, arguments[0])
        _, mode, begin, nbytes, *_ = arguments
        if node is None:
            return
        if mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE):
            end = min(begin + nbytes, len(self.folder.files[node]))
            self.do(Write(node, begin, bytes(max(end - begin, 0))))
        if not mode & FALLOC_KEEP_SIZE:
            self.do(Resize(node, begin + nbytes, grows=True))

    # Flushing

    def see_fsync(self, pid: int, arguments: list[int]) -> None:
        node = self.of_descriptor(pid, arguments[0])
        if node is not None:
            self.do(Flush(node))

    see_fdatasync = see_fsync

    def see_syncfs(self, pid: int, arguments: list[int]) -> None:
        self.do(Flush(None))


def memory(pid: int, address: int, nbytes: int) -> bytes:
    """Return bytes of the memory of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        found = os.pread(file.fileno(), nbytes, address)
    if len(found) != nbytes:
        raise OSError(errno.EFAULT, f"{len(found)} of {nbytes} bytes of memory")
    return found


def text(pid: int, address: int) -> str:
    return argument_path("path", 0, pid, [address]).removeprefix(descriptor_path(pid, -100) + "/")


def number(pid: int, address: int) -> int:
    return int(struct.unpack("=q", memory(pid, address, 8))[0])


def vector(pid: int, arguments: list[int]) -> bytes:
    """Return the bytes of the buffers of `writev`."""
    parts = struct.iter_unpack("=QQ", memory(pid, arguments[1], 16 * arguments[2]))
    return b"".join(memory(pid, address, nbytes) for address, nbytes in parts)


def offset(pid: int, descriptor: int, end: int) -> int:
    """Return the position of a descriptor: `end` if it appends."""
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor & 0xFFFFFFFF}").read_text().splitlines()
    found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return end if int(found["flags"], 8) & os.O_APPEND else int(found["pos"])


def clones(place: str) -> bool:
    """Return whether the file system of this folder can clone files."""
    return os.statvfs(place).f_fsid != 0 and _magic(place) in ("btrfs", "xfs")


def _magic(place: str) -> str:
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if (place + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
            best = point, kind
    return best[1]
