"""Every kind of system call fails, in every way to write and to read a file."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.traced import traced

pytestmark = pytest.mark.slow

if sys.platform != "linux":
    pytest.skip("strace traces Linux", allow_module_level=True)

# Every way to write the file at `path`, or a checkpoint in `shards`. The results differ from the files of
# `models`.
WRITERS = """
from writers import editors, savers, writers

path, durable = sys.argv[1], sys.argv[2] == "durable"
WRITERS = writers(path, durable)
if path == "model.safetensors":
    WRITERS |= editors(path, durable)
"""

ATTEMPTS = """
def tree():
    # By another way than `.`, calls on which may be made to fail.
    found = {}
    for folder, _, files in os.walk(os.path.join("..", os.path.basename(os.getcwd()))):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.join(folder, name)] = file.read()
    return found

before, holds, found = tree(), held(), {}
assert before
for name, write in WRITERS.items():
    fault = None
    try:
        write()
    except OSError as error:
        fault = [isinstance(error, ingot.StorageError), error.errno, error.filename, str(error)]
    after = tree()
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    found[name] = [fault, changed, settled(holds) == holds or held()]
    # The next one finds what the first did.
    for key, data in before.items():
        with open(key, "wb") as file:
            file.write(data)
    for key in after.keys() - before.keys():
        os.unlink(key)
say(found)
"""


@pytest.fixture
def models(tmp_path: Path, served: None) -> Path:
    """Return a folder with a file, another one, and the first one split into shards."""
    folder = tmp_path / "models"
    folder.mkdir()
    old = {"a": numpy.ones(20_000), "b": numpy.arange(7)}
    ingot.numpy.save_file(old, folder / "model.safetensors", {"format": "np"}, durable=False)
    ingot.numpy.save_file({"c": numpy.ones(9)}, folder / "other.safetensors", durable=False)
    ingot.split(folder / "model.safetensors", folder / "shards", 100_000, durable=False)
    return folder


WRITES = "pwrite64,copy_file_range,sendfile"
RENAMES = "rename,renameat,renameat2"
# The written file, the fault, the step in the message, and the writers that do not make such a call.
FAULTS: list[tuple[str, str, str, set[str]]] = [
    ("model", "fallocate:error=EDQUOT", "reserve space", {"appender"}),
    ("new", "fallocate:error=ENOSPC", "reserve space", {"appender"}),
    ("model", f"{WRITES}:error=EIO", "write", set()),
    ("new", f"{WRITES}:error=EFBIG", "write", set()),
    ("model", "fsync,fdatasync:error=ENOSPC", "flush", set()),
    ("new", "linkat:error=EDQUOT", "rename the temporary file", {"writer", "joined", "appender", "download"}),
    ("model", f"{RENAMES}:error=EIO", "rename the temporary file", set()),
]


def attempts(models: Path, *inject: str, name: str = "model.safetensors", **options: Any) -> dict[str, Any]:
    """Return for each writer its error, its changes, and whether it closed everything."""
    program = WRITERS + ATTEMPTS
    found: dict[str, Any] = traced(program, name, "durable", folder=models, inject=inject, **options).said()
    return found


@pytest.mark.parametrize(("name", "fault", "step", "spared"), FAULTS)
def test_writers_keep_the_old_file_if_a_step_fails(
    models: Path, name: str, fault: str, step: str, spared: set[str]
) -> None:
    name = f"{name}.safetensors"
    number = getattr(errno, fault.partition("error=")[2])
    for writer, (found, changed, is_released) in attempts(models, fault, name=name).items():
        assert is_released is True, f"{writer} holds {is_released}"
        if writer in spared:
            assert found is None, writer
            continue
        # The fetched part stays, for a resumed download.
        part = [f"../models/.{name}.ingot-part"] if writer == "download" else []
        assert changed in ([], part), writer
        is_ours, code, filename, message = found
        assert is_ours, writer
        assert code == number, writer
        assert f": could not {step}" in message, writer
        assert message.startswith(f"{filename}: "), writer
        assert writer == "split" or Path(filename).name == name, writer
        assert re.search(r": the file needs [1-9]\d* bytes", message), writer


IN_PLACE = """
written = savers(path, durable, atomic=False)
WRITERS = {name: write for name, write in written.items() if name in sys.argv[3:]}
"""
WRITTEN_IN_PLACE = ["small", "large", "background", "checksums", "bintensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "new.safetensors"])
@pytest.mark.parametrize("fault", ["fallocate:error=ENOSPC", "pwrite64:error=EDQUOT"])
def test_in_place_save_reserves_before_it_writes(models: Path, name: str, fault: str) -> None:
    number = getattr(errno, fault.partition("error=")[2])
    program = WRITERS + IN_PLACE + ATTEMPTS
    found = traced(program, name, "durable", *WRITTEN_IN_PLACE, folder=models, inject=[fault]).said()
    assert sorted(found) == sorted(WRITTEN_IN_PLACE)
    for writer, ((_, code, _, _), changed, is_released) in found.items():
        assert (code, changed, is_released) == (number, [], True), writer


def test_writers_report_a_directory_that_cannot_be_flushed(models: Path) -> None:
    found = attempts(models, "fsync,fdatasync:error=EIO", only=models)
    for writer, (fault, changed, is_released) in found.items():
        assert is_released is True, writer
        # A checkpoint is in a directory of its own.
        if writer != "split":
            assert fault[1] == errno.EIO, writer
            assert "could not flush its directory, though it is written" in fault[3], writer
            assert [Path(path).name for path in changed] == ["model.safetensors"], writer


@pytest.mark.parametrize("number", ["EMFILE", "EROFS"])
def test_writers_keep_the_old_file_if_none_can_be_created(models: Path, number: str) -> None:
    found = attempts(models, f"openat,openat2,open:error={number}", only=models)
    for writer, (fault, changed, is_released) in found.items():
        assert is_released is True, writer
        if writer != "split":
            assert fault is not None, writer
            assert fault[1] == getattr(errno, number), writer
            assert Path(fault[2]).name == "model.safetensors", writer
            assert changed == [], writer


FLUSHED = """
# Those that need what the others replace come last in the table.
for name in reversed(WRITERS):
    mark(name)
    WRITERS[name]()
mark("end")
"""
TOUCHES = ["fallocate", "ftruncate", "fchmod", "fsetxattr", "write", *WRITES.split(",")]
FLUSHES = ["fsync", "fdatasync", "sync_file_range", "syncfs"]
SEEN = ",".join([*TOUCHES, *FLUSHES, RENAMES])


PASSING = (".0000000000000000.ingot-tmp", "/.ingot-saving.lock")


def lost(calls: list[str], folder: Path) -> list[str]:
    """Return the results of `calls` that a power cut may lose: bytes of renamed files, and names."""
    files, names, gone = set[str](), set[str](), []
    for call in calls:
        name, _, arguments = call.partition("(")
        # strace prints a descriptor's path after its number, and the inode of a file without a name.
        paths = [path for path in re.findall(r"<(/[^>]*)>", arguments) if str(folder) in path]
        if name == "rename":
            gone += sorted(files)
            names.add(str((folder / arguments.split('"')[3]).parent))
        elif name in RENAMES.split(","):
            gone += sorted(files)
            names.add(paths[-1])
        elif name in FLUSHES:
            files.discard(paths[0])
            names.discard(paths[0])
        # The journal of a writer and the lock of a directory are removed before the save ends.
        elif name in TOUCHES and paths and not paths[0].endswith(PASSING):
            # `copy_file_range` copies from the first descriptor to the second.
            files.add(paths[-1] if name == "copy_file_range" else paths[0])
    return gone + sorted(names)


@pytest.mark.parametrize("name", ["model.safetensors", "new.safetensors"])
def test_writers_flush_a_file_before_and_its_name_after_renaming(models: Path, name: str) -> None:
    seen = traced(WRITERS + FLUSHED, name, "durable", folder=models, trace=SEEN)
    assert seen.code == 0, seen.err
    for writer, calls in seen.calls.items():
        if writer not in ("", "end"):
            assert any(call.startswith("rename") for call in calls), writer
            assert lost(calls, models) == [], writer


def test_writers_without_durable_flush_nothing(models: Path) -> None:
    seen = traced(WRITERS + FLUSHED, "model.safetensors", "fast", folder=models, trace=SEEN)
    assert seen.code == 0, seen.err
    calls = [call for of_one in seen.calls.values() for call in of_one]
    assert [call for call in calls if call.startswith(tuple(FLUSHES))] == []


# NFS and SMB may send the bytes of a file only when it is closed, and `close` reports the error.
FAR = {"NFS": "6969000000000000", "SMB2": "424d53fe00000000", "CIFS": "424d53ff00000000"}


@pytest.mark.parametrize("system", FAR)
def test_writers_find_a_full_network_disk_before_they_return(models: Path, system: str) -> None:
    # strace makes `statfs` report another type of file system.
    disguise = f"fstatfs:poke_exit=@arg2={FAR[system]}"
    seen = traced(
        WRITERS + FLUSHED, "model.safetensors", "fast", folder=models, trace=SEEN, inject=[disguise]
    )
    assert seen.code == 0, seen.err
    for writer in ("small", "large", "background", "checksums", "merge", "rewrite"):
        flushes = [call for call in seen.calls[writer] if call.startswith(("fsync", "rename"))]
        assert [call.partition("(")[0].partition("at")[0] for call in flushes] == ["fsync", "rename"], writer


INTERRUPTED_READS = """
path, options = "model.safetensors", {"backend": "pread"}
expected = {"large": numpy.arange(9 << 20, dtype=numpy.uint32).reshape(9, -1), "small": numpy.ones(7)}
out = {"large": numpy.empty_like(expected["large"])}
with ingot.safe_open(path, "np", backend="pread") as file:
    part = file.get_slice("large")
    found = [
        file.get_tensors(),
        dict(file.prefetch()),
        ingot.numpy.load_file(path, **options),
        ingot.numpy.load_file(path, verify=True, **options),
        ingot.numpy.load_file(path, out=out, **options),
    ]
    rows = [part[3:5], part[[3, 4]], part[3:5, :]]
same = [(tensors[name] == array).all() for tensors in found for name, array in expected.items()]
same += [(array == expected["large"][3:5]).all() for array in rows]
say([bool(all(same)), ingot.hash(path), ingot.verify(path).ok])
"""


def test_readers_continue_after_interrupts(tmp_path: Path) -> None:
    arrays = {"large": numpy.arange(9 << 20, dtype=numpy.uint32).reshape(9, -1), "small": numpy.ones(7)}
    folder, path = tmp_path / "models", tmp_path / "models" / "model.safetensors"
    folder.mkdir()
    ingot.numpy.save_file(arrays, path, durable=False, checksums=True)
    interrupt = "pread64,preadv2,read:error=EINTR:when=2+3"
    seen = traced(INTERRUPTED_READS, folder=folder, inject=[interrupt], only=path)
    assert seen.said() == [True, ingot.hash(path), True]
    assert sum("EINTR" in call for calls in seen.calls.values() for call in calls) > 10


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "ETIMEDOUT"])
def test_readers_name_the_bytes_of_an_unreadable_header(models: Path, number: str) -> None:
    program = """
found = []
for backend in ("auto", "mmap", "pread"):
    try:
        ingot.numpy.load_file("model.safetensors", backend=backend)
    except ingot.StorageError as fault:
        found.append([fault.errno, fault.filename, str(fault), descriptors()])
say(found)
"""
    path = models / "model.safetensors"
    seen = traced(program, folder=models, inject=[f"pread64,read:error={number}"], only=path)
    found = seen.said()
    assert len(found) == 3
    for code, filename, message, held in found:
        assert (code, filename) == (getattr(errno, number), "model.safetensors")
        assert re.match(r"model\.safetensors: reading bytes 0\.\.\d+ of the file: ", message)
        assert held == found[0][3]


def test_readers_copy_the_header_before_mapping(models: Path) -> None:
    # The file is opened once, and the header is copied out of it: the mapping is for tensors.
    program = """
mark("opening")
file = ingot.safe_open("model.safetensors", "np", backend="mmap")
mark("reading")
file["a"], file.get_slice("b")[2:], file.metadata()
"""
    seen = traced(program, folder=models, trace="openat,open,mmap,pread64,read,statx,fstat")
    assert seen.code == 0, seen.err
    calls = [call for call in seen.calls["opening"] if "model.safetensors" in call]
    names = [call.partition("(")[0] for call in calls]
    assert [name for name in names if name.startswith("open")] == names[:1]
    # Later calls use the open file.
    assert all("<" + str(models / "model.safetensors") in call for call in calls)
    assert names.index("pread64") < names.index("mmap")
    later = [call for call in seen.calls["reading"] if "model.safetensors" in call]
    assert {call.partition("(")[0] for call in later} <= {"statx", "fstat", "newfstatat"}


@pytest.mark.parametrize("system", FAR)
def test_readers_do_not_map_a_network_file(models: Path, system: str) -> None:
    program = """
with ingot.safe_open("model.safetensors", "np") as file:
    say([file.backend, file.why, float(file["a"].sum())])
"""
    disguise = f"fstatfs:poke_exit=@arg2={FAR[system]}"
    backend, why, total = traced(program, folder=models, inject=[disguise]).said()
    assert (backend, total) == ("pread", 20_000)
    assert "slow to map" in why
