"""A hostile environment: kills, full disks, missing rights, files cut short, threads, limits, huge headers.

Everything that is limited, killed or measured runs in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.processes import Ended, run

BACKENDS = ["mmap", "pread"]
ARRAY = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)


def file_of(header: bytes, data_nbytes: int, path: Path) -> None:
    """A file whose data is a hole: it takes no room on the disk, and reads as zeros."""
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.truncate(8 + len(header) + data_nbytes)


def one_tensor(path: Path, nbytes: int) -> None:
    file_of(b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes), nbytes, path)


# Killed

KILLED = """
import random
path, sizes = "model.safetensors", [1, 4096, 300_000, 5_000_000, 40_000_000]
random.seed(int(sys.argv[1]))

def state(number, nbytes):
    "A file that is easy to tell from any other, and any mix of two."
    sizes = {"a": nbytes, "b": nbytes // 3}
    return {name: numpy.full(size, number % 251, numpy.uint8) for name, size in sizes.items()}

def check():
    with ingot.safe_open(path, "np", backend="pread") as file:
        number, nbytes = int(file.metadata()["number"]), int(file.metadata()["nbytes"])
        found, expected = file.get_tensors(), state(number, nbytes)
        assert set(found) == set(expected)
        assert all((found[name] == expected[name]).all() for name in expected), number
    return number

def save(number, nbytes):
    metadata = {"number": str(number), "nbytes": str(nbytes)}
    options = {"durable": number % 2 == 0, "background": number % 3 == 0}
    saved = ingot.numpy.save_file(state(number, nbytes), path, metadata, **options)
    if saved is not None:
        saved.result()

found = []
save(0, sizes[0])
for kill in range(int(sys.argv[2])):
    nbytes = sizes[kill % len(sizes)]
    began = time.monotonic()
    save(1000 * kill + 1000, nbytes)
    took = time.monotonic() - began
    ready, said = os.pipe()
    saver = os.fork()
    if saver == 0:
        # Saves one file after another until it is killed.
        number = 1000 * kill + 1000
        while True:
            number += 1
            if number == 1000 * kill + 1002:
                os.write(said, b"x")
            save(number, nbytes)
    os.read(ready, 1)
    time.sleep(random.uniform(0, 2 * took))
    os.kill(saver, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(saver, 0)[1]) == signal.SIGKILL
    os.close(ready), os.close(said)
    number = check()
    assert 1000 * kill + 1000 <= number
    left = sorted(set(os.listdir()) - {path})
    found.append(len(left))
    save(1000 * kill + 1999, nbytes)
    assert check() == 1000 * kill + 1999
    assert os.listdir() == [path], os.listdir()
say(found)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file_and_nothing_else(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kills = int(os.environ.get("INGOT_KILLS", "20"))
    left = run(KILLED, seed, kills, folder=tmp_path).said()
    # One temporary file at most, and the next save takes it away.
    assert len(left) == kills
    assert max(left) <= 1


# Full, forbidden


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "in place"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_keeps_the_old_file(small_disk: Path, options: dict[str, Any], durable: bool) -> None:
    path = small_disk / "model.safetensors"
    ingot.numpy.save_file({"a": ARRAY}, path)
    before = path.read_bytes()
    with pytest.raises(ingot.StorageError) as caught:
        ingot.numpy.save_file({"a": numpy.ones(8 << 20, numpy.uint8)}, path, durable=durable, **options)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert str(path) in str(caught.value)
    # What is needed, with the header.
    assert str((8 << 20) + 80) in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(small_disk) == [path.name]
    # There is room for the old one and a new one of 1 MiB again and again.
    for _ in range(8):
        ingot.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, path, durable=durable)


def assert_names(fault: OSError, path: Path) -> None:
    """It speaks of `path`, and of no name that the caller never gave."""
    assert os.fspath(path) in str(fault)
    assert fault.filename == os.fspath(path)
    assert fault.filename2 is None
    assert ".ingot-" not in f"{fault} {fault.args} {vars(fault)}"


@pytest.mark.parametrize("made", ["split", "save_sharded", "convert", "shards", "Writer", "rewrite", "merge"])
def test_a_full_disk_is_reported_of_the_file_that_was_asked_for(
    small_disk: Path, tmp_path: Path, made: str
) -> None:
    arrays = {"a": numpy.ones(1000, numpy.uint8), "b": numpy.ones(8 << 20, numpy.uint8)}
    source, folder = tmp_path / "source.safetensors", small_disk / "model"
    folder.mkdir()
    ingot.numpy.save_file(arrays, source)
    one, shard = folder / "m.safetensors", folder / "model-00001-of-00002.safetensors"

    def fill() -> None:
        with ingot.Writer(one, {"b": arrays["b"]}) as writer:
            writer.write("b", arrays["b"])
            writer.commit()

    make, path = {
        "split": (lambda: ingot.split(source, folder, 2000), shard),
        "save_sharded": (lambda: save_sharded(arrays, folder), shard),
        "convert": (lambda: ingot.convert(source, one), one),
        "shards": (lambda: ingot.convert(source, folder, max_shard_size=2000), shard),
        "Writer": (fill, one),
        "rewrite": (lambda: ingot.rewrite(source, one), one),
        "merge": (lambda: ingot.merge([source], one), one),
    }[made]
    with pytest.raises(ingot.StorageError) as caught:
        make()
    assert caught.value.errno == errno.ENOSPC
    assert_names(caught.value, path)
    assert caught.value.path == os.fspath(path)
    assert list(folder.iterdir()) == []


def save_sharded(arrays: dict[str, Any], folder: Path) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ingot.torch.save_sharded(tensors, folder, max_shard_size=2000)


def test_a_name_that_cannot_be_taken_is_reported_as_itself(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    ingot.numpy.save_file({"a": ARRAY}, source)
    (tmp_path / "model.safetensors").mkdir()
    for make in (
        lambda: ingot.split(source, tmp_path),
        lambda: save_sharded({"a": ARRAY}, tmp_path),
        lambda: ingot.convert(source, tmp_path / "", format="safetensors", overwrite=True),
    ):
        with pytest.raises(IsADirectoryError) as caught:
            make()
        assert_names(caught.value, tmp_path / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "source.safetensors"]


# ext4 refuses to reserve room in files that it keeps without extents: then the writes meet the full disk.
@pytest.fixture(params=[[], ["-O", "^extent,^64bit"]], ids=["reserved", "written"])
def disk_of_96_mib(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An ext4 of 96 MiB, on which files can be written past the page cache."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root may mount a file system, and only mkfs.ext4 makes one")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    made = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", *request.param, image]
    subprocess.run(made, check=True, capture_output=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", image, disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    (disk / "lost+found").rmdir()
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_keeps_a_large_old_file(disk_of_96_mib: Path, durable: bool, background: bool) -> None:
    path = disk_of_96_mib / "model.safetensors"

    def save(nbytes: int) -> None:
        arrays = {"a": numpy.full(nbytes, nbytes % 251, numpy.uint8)}
        saved = ingot.numpy.save_file(arrays, path, durable=durable, background=background)
        if saved is not None:
            saved.result()

    save(40 << 20)
    before = path.read_bytes()
    for nbytes in (64 << 20, 90 << 20, 200 << 20):
        with pytest.raises(ingot.StorageError) as caught:
            save(nbytes)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert str(nbytes + 80) in str(caught.value), "what is needed, with the header"
        assert path.read_bytes() == before
        assert os.listdir(disk_of_96_mib) == [path.name]
    # There is room for the old one and a new one of the same size again and again.
    for _ in range(4):
        save(40 << 20)
    assert path.read_bytes() == before


def test_a_disk_without_room_for_a_name_keeps_the_old_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "nr_inodes=2", "tmpfs", disk]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        path = disk / "model.safetensors"
        ingot.numpy.save_file({"a": ARRAY}, path, atomic=False)
        before = path.read_bytes()
        with pytest.raises(OSError, match="No space") as caught:
            ingot.numpy.save_file({"a": ARRAY + 1}, path)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert (path.read_bytes(), os.listdir(disk)) == (before, [path.name])
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_is_full_to_the_last_byte(small_disk: Path) -> None:
    path = small_disk / "model.safetensors"
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(8 << 20))
    with pytest.raises(ingot.StorageError) as caught:
        ingot.numpy.save_file({"a": ARRAY}, path)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["filler"]


FORBIDDEN = """
become_nobody()
ok = numpy.ones(3)
found = []
for options in ({}, {"atomic": False}):
    for name in ("new", "old"):
        try:
            ingot.numpy.save_file({"a": ok}, name, **options)
            found.append("saved")
        except OSError as fault:
            found.append([type(fault).__name__, fault.errno, fault.filename])
say([found, sorted(os.listdir()), ingot.numpy.load_file("old")["a"].tolist()])
"""


def test_a_read_only_directory_is_said_so_and_its_files_can_be_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(ingot.numpy.save({"a": ARRAY}))
    (tmp_path / "old").chmod(0o666)
    tmp_path.chmod(0o555)
    try:
        found, names, array = run(FORBIDDEN, folder=tmp_path).said()
    finally:
        tmp_path.chmod(0o755)
    refused = [["PermissionError", errno.EACCES, name] for name in ("new", "old")]
    assert found == [*refused, ["PermissionError", errno.EACCES, "new"], "saved"]
    assert names == ["old"]
    assert array == [1, 1, 1]


def test_a_directory_in_which_nothing_is_listed_or_left_is_no_matter(tmp_path: Path) -> None:
    program = """
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
try:
    ingot.numpy.save_file({"a": numpy.ones(3)}, "t")
except OSError as fault:
    say([type(fault).__name__, fault.errno])
"""
    assert run(program, folder=tmp_path).said() == ["FileNotFoundError", errno.ENOENT]


# Changed while it is open


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep", [0, 7, 100, 4096, 500_000])
def test_a_file_cut_short_is_an_error_and_no_signal(path: Path, backend: str, keep: int) -> None:
    tensors = {name: numpy.ones((500, 500), numpy.uint8) for name in "abcd"}
    ingot.numpy.save_file(tensors, path)
    program = """
backend, keep = sys.argv[1], int(sys.argv[2])
file = ingot.safe_open("model.safetensors", "np", backend=backend)
parts = {name: file.get_slice(name) for name in file}
os.truncate("model.safetensors", keep)
reads = [lambda: file["d"], lambda: file["a"], file.get_tensors, lambda: list(file.items())]
at = numpy.s_
for index in (at[0], at[::2], at[:, ::3], at[[1, 0]], at[..., None], at[-1, -1]):
    reads += [lambda index=index, name=name: parts[name][index] for name in "ad"]
found = set()
for read in reads:
    try:
        read()
        found.add("read")
    except ingot.StorageError as fault:
        found.add(fault.code)
say([sorted(found), file.keys(), len(file), list(file.info("a").shape)])
"""
    found = run(program, backend, keep, folder=path.parent).said()
    # The header is a copy, so what it says can still be asked for.
    assert found == [["changed"], ["a", "b", "c", "d"], 4, [500, 500]]


def test_an_unaligned_file_cut_short_is_an_error_and_no_signal(path: Path) -> None:
    # The tensors of such a file are copied out of the mapping.
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"b":{"dtype":"F64","shape":[50000],"data_offsets":[1,400001]}}'
    file_of(header, 400_001, path)
    program = """
file = ingot.safe_open("model.safetensors", "np", backend="mmap")
before = file["b"]
os.truncate("model.safetensors", 200)
found = [float(before.sum())]
part = file.get_slice("b")
for read in (lambda: file["b"], file.get_tensors, lambda: part[1:], lambda: part[::7]):
    try:
        found.append(len(read()))
    except ingot.StorageError as fault:
        found.append(fault.code)
say(found)
"""
    assert run(program, folder=path.parent).said() == [0.0, *["changed"] * 4]


CUT_BY_ANOTHER = """
stop = threading.Event()
def cut():
    # Cuts the file to one page and mends it, again and again.
    with open("model.safetensors", "r+b") as file:
        whole = file.read()
        while not stop.is_set():
            file.truncate(4096)
            file.seek(4096)
            file.write(whole[4096:])
            file.flush()
thread = threading.Thread(target=cut)
thread.start()
codes = set()
for _ in range(300):
    try:
        with ingot.safe_open("model.safetensors", "np", backend=sys.argv[1]) as file:
            part = file.get_slice("a")
            array = eval(sys.argv[2])
        codes.add("read")
    except ingot.SafetensorError as fault:
        codes.add(fault.code)
stop.set()
thread.join()
say(sorted(codes))
"""


@pytest.mark.parametrize(
    ("backend", "read"),
    [("pread", 'file["a"]'), ("pread", "part[::2]"), ("mmap", "part[::2]"), ("mmap", "part[[0, -1]]")],
)
def test_a_file_cut_short_while_it_is_copied_is_an_error_and_no_signal(
    path: Path, backend: str, read: str
) -> None:
    ingot.numpy.save_file({"a": numpy.ones((1000, 1000), numpy.uint8)}, path)
    found = run(CUT_BY_ANOTHER, backend, read, folder=path.parent)
    # Mended within the tick of the clock that it was opened in, it looks unchanged: then the read was short.
    assert set(found.said()) <= {"read", "changed", "short-read", "read-failed", "truncated"}


@pytest.mark.parametrize("module", [ingot.numpy, ingot.torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_saving_over_a_mapped_file_leaves_the_old_tensors(path: Path, module: Any, backend: str) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    old = module.load_file(path, backend=backend)
    for number in range(1, 20):
        ingot.numpy.save_file({"a": ARRAY + number}, path)
        assert (ingot.numpy.load_file(path)["a"] == ARRAY + number).all()
    assert (numpy.asarray(old["a"]) == ARRAY).all()


# Many at once


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_64_threads_share_one_handle_while_it_is_closed(path: Path, backend: str, framework: str) -> None:
    arrays = {f"t{number}": numpy.full((50, number + 1), number, numpy.int32) for number in range(20)}
    ingot.numpy.save_file(arrays, path, {"k": "v"})
    handles = [ingot.safe_open(path, framework, backend=backend) for _ in range(4)]
    start = threading.Barrier(64)
    faults: list[BaseException] = []
    closed = [0]

    def use(number: int) -> None:
        chance = random.Random(number)
        try:
            start.wait()
            for round in range(60):
                file = handles[round // 15]
                name = chance.choice(list(arrays))
                expected = arrays[name]
                try:
                    action = chance.randrange(7)
                    if action == 0:
                        assert file.get_tensor(name).tolist() == expected.tolist()
                    elif action == 1:
                        part = file.get_slice(name)
                        if number % 16 == 0 and round % 15 == 14:
                            file.close()
                        assert part[3:40:7].tolist() == expected[3:40:7].tolist()
                    elif action == 2:
                        assert file.keys() == sorted(arrays)
                    elif action == 3:
                        found = file.get_tensors([name, "t0"])
                        assert found[name].tolist() == expected.tolist()
                    elif action == 4:
                        assert file.metadata() == {"k": "v"}
                    elif action == 5:
                        assert tuple(file.info(name).shape) == expected.shape
                    elif round % 15 == 14 and number % 8 == 0:
                        file.close()
                except ingot.ClosedError:
                    closed[0] += 1
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    for handle in handles:
        handle.close()


def test_two_saves_at_once_leave_one_of_the_two(path: Path) -> None:
    states = [numpy.full(300_000 + number, number, numpy.uint8) for number in range(8)]
    faults: list[BaseException] = []

    def save(state: Any) -> None:
        try:
            for _ in range(15):
                ingot.numpy.save_file({"a": state}, path)
                found = ingot.numpy.load_file(path)["a"]
                assert (found == states[found[0]]).all()
                assert found.shape == states[found[0]].shape
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=save, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert os.listdir(path.parent) == [path.name]


FORK = """
backend, framework = sys.argv[1:]
if framework == "pt":
    import ingot.torch
file = ingot.safe_open("model.safetensors", framework, backend=backend)
part = file.get_slice("b")
# Whatever threads ingot keeps are running now.
file.get_tensors()
stop = threading.Event()
def read():
    while not stop.is_set():
        file.get_tensors()
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        # Nothing of the parent's locks and threads may be waited for.
        signal.alarm(120)
        tensors = file.get_tensors(["a", "b"]).values()
        ok = all((numpy.asarray(tensor) == number).all() for number, tensor in enumerate(tensors))
        ok &= (numpy.asarray(part[::2]) == 1).all() and file.keys() == ["a", "b"]
        with ingot.safe_open("model.safetensors", framework, backend=backend) as again:
            ok &= (numpy.asarray(again["b"]) == 1).all()
        ingot.numpy.save_file({"a": numpy.ones(5_000_000)}, "child")
        ok &= bool((ingot.numpy.load_file("child", backend=backend)["a"] == 1).all())
        file.close()
        os._exit(0 if ok else 1)
    codes.append(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
# What the child closed is still open here.
say([codes, bool((numpy.asarray(file["b"]) == 1).all())])
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_child_reads_and_saves_after_a_fork(path: Path, backend: str, framework: str) -> None:
    arrays = {name: numpy.full(3_000_000, number, numpy.uint8) for number, name in enumerate("ab")}
    ingot.numpy.save_file(arrays, path)
    assert run(FORK, backend, framework, folder=path.parent).said() == [[0] * 10, True]


# Limits


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_of_a_tebibyte_opens_and_its_end_is_read(path: Path, backend: str) -> None:
    nbytes = 1 << 40
    try:
        file_of(
            b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},'
            b'"b":{"dtype":"I16","shape":[1],"data_offsets":[%d,%d]}}' % (nbytes, nbytes, nbytes, nbytes + 2),
            nbytes + 2,
            path,
        )
    except OSError as fault:
        pytest.skip(f"the file system of {path.parent} holds no file of 1 TiB: {fault}")
    with path.open("r+b") as data:
        data.seek(-2, os.SEEK_END)
        data.write(b"\x01\x02")
        data.seek(-5, os.SEEK_END)
        data.write(b"\x07")
    for framework in ("np", "pt"):
        with ingot.safe_open(path, framework, backend=backend) as file:
            assert file["b"].tolist() == [0x0201]
            part = file.get_slice("a")
            assert part[-3:].tolist() == [7, 0, 0]
            assert part[nbytes - 4 : nbytes + 10 : 2].tolist() == [0, 0]
            assert part[:: nbytes // 4].tolist() == [0] * 4
            assert part[[0, -3]].tolist() == [0, 7]
    if backend == "pread":
        program = """
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
with ingot.safe_open("model.safetensors", "np", backend="pread") as file:
    try:
        file["a"]
    except MemoryError as fault:
        say(str(fault))
"""
        message = run(program, folder=path.parent).said()
        assert message.startswith("model.safetensors: ")
        assert str(nbytes) in message


def test_where_address_space_is_short_auto_reads_instead_of_mapping(path: Path) -> None:
    one_tensor(path, 1 << 30)
    program = """
limit = memory("VmSize") + (512 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with ingot.safe_open("model.safetensors", "np") as file:
    part = file.get_slice("a")
    found = [file.backend, file.why, part[-2:].tolist(), part[:: 1 << 29].tolist()]
    try:
        file["a"]
    except MemoryError as fault:
        found.append(str(fault))
try:
    ingot.safe_open("model.safetensors", "np", backend="mmap")
except OSError as fault:
    found += [fault.errno, fault.filename]
say(found)
"""
    backend, why, end, some, message, number, filename = run(
        program, folder=path.parent, INGOT_BACKEND=""
    ).said()
    assert backend == "pread"
    assert "mapping the file failed" in why
    assert (end, some) == ([0, 0], [0, 0])
    assert "model.safetensors" in message
    assert (number, filename) == (errno.ENOMEM, "model.safetensors")


def test_too_many_open_files_is_said_so(path: Path) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
# What NumPy imports when an array is first saved.
ingot.numpy.save({"a": numpy.ones(2)})
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, descriptors() + 20))
found, files = [], []
try:
    while True:
        files.append(ingot.safe_open("model.safetensors", "np"))
except OSError as fault:
    found.append([fault.errno, fault.filename])
try:
    ingot.numpy.save_file({"a": numpy.ones(2)}, "other")
except OSError as fault:
    found.append([fault.errno, fault.filename])
found.append(files[-1]["a"].tolist() == files[0]["a"].tolist())
for file in files:
    file.close()
found.append(ingot.safe_open("model.safetensors", "np")["a"].shape[0])
say([*found, os.listdir()])
"""
    found = run(program, folder=path.parent).said()
    assert found == [[errno.EMFILE, "model.safetensors"], [errno.EMFILE, "other"], True, 6, [path.name]]


INTERRUPTED = """
def counted(name):
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

def interrupt(name, before):
    # As Ctrl-C does, once 64 MiB have been moved: in the middle of what takes gigabytes.
    while counted(name) - before < 64 << 20:
        pass
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(name, call):
    before = counted(name)
    threading.Thread(target=interrupt, args=(name, before)).start()
    try:
        call()
    except KeyboardInterrupt:
        # Python raises it in any case, when all is done. Less than half must have been.
        return "interrupted" if counted(name) - before < 1 << 30 else "interrupted late"
    return "went on"
"""


def can_count_io() -> bool:
    return Path("/proc/self/io").exists()


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_ctrl_c_ends_a_long_load(path: Path, framework: str) -> None:
    file_of(
        b'{"a":{"dtype":"U8","shape":[2,%d],"data_offsets":[0,%d]},'
        b'"b":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}'
        % (2 << 30, 4 << 30, 4 << 30, (4 << 30) + 1),
        (4 << 30) + 1,
        path,
    )
    program = """
framework = sys.argv[1]
if framework == "pt":
    import ingot.torch
file = ingot.safe_open("model.safetensors", framework, backend="pread")
part = file.get_slice("a")
calls = [lambda: file["a"], file.get_tensors]
calls += [lambda: part[:], lambda: part[1], lambda: part[:, 1:], lambda: part[:, ::2]]
found = [interrupted("rchar", call) for call in calls]
load_file = (ingot.torch if framework == "pt" else ingot.numpy).load_file
found.append(interrupted("rchar", lambda: load_file("model.safetensors", backend="pread")))
say([found, memory("VmRSS") < 1 << 30, file["b"].tolist()])
"""
    assert run(INTERRUPTED + program, framework, folder=path.parent).said() == [
        ["interrupted"] * 7,
        True,
        [0],
    ]


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
def test_ctrl_c_ends_a_long_save_and_leaves_nothing(path: Path) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    before = path.read_bytes()
    program = """
# Pages that nobody has written to take no memory.
array = numpy.zeros(2 << 30, numpy.uint8)
found = []
for options in ({}, {"durable": False}, {"atomic": False}):
    for name in ("model.safetensors", "new"):
        call = lambda: ingot.numpy.save_file({"a": array}, name, **options)
        found.append([interrupted("wchar", call), sorted(os.listdir())])
say(found)
"""
    space = os.statvfs(path.parent)
    if space.f_bavail * space.f_frsize < 5 << 30:
        pytest.skip(f"less than 5 GiB are free below {path.parent}")
    found = run(INTERRUPTED + program, folder=path.parent).said()
    assert found == [["interrupted", [path.name]]] * 6
    assert path.read_bytes() == before


# What reads the file `model.safetensors`, whose tensor `a` has 4 GiB.
LONG_READS = {
    "conversion": 'ingot.numpy.load_file(path, dtype="F16", backend="pread")',
    "verifying load": "ingot.numpy.load_file(path, verify=True)",
    "memory that is there": "ingot.numpy.load_file(path, out=out, keys=['a'], backend='pread')",
    "list": 'ingot.safe_open(path, "np", backend="pread").get_slice("a")[[0, 1, 0]]',
    "iterator": 'deque(ingot.safe_open(path, "np", backend="pread").iter_tensors(), maxlen=0)',
    "handle": 'ingot.safe_open(path, "np").warm()',
    "cache": "ingot.warm(path)",
    "hash": 'ingot.hash(path, "blake3")',
    "verification": "ingot.verify(path)",
}


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
def test_ctrl_c_ends_whatever_reads_for_long_and_leaves_nothing_open(path: Path) -> None:
    # Digests that are as long as they have to be, of nothing.
    record = '{\\"algorithm\\":\\"sha256\\",\\"tensors\\":{\\"a\\":\\"' + "0" * 64 + '\\"}}'
    header = f'{{"__metadata__":{{"ingot.checksums":"{record}"}},'
    header += f'"a":{{"dtype":"F32","shape":[2,{1 << 29}],"data_offsets":[0,{4 << 30}]}}}}'
    file_of(header.encode(), 4 << 30, path)
    program = """
from collections import deque
import ingot._open, ingot._hash
path = "model.safetensors"
# Pages that nobody has written to take no memory.
out = {"a": numpy.empty((2, 1 << 29), numpy.float32)}
ingot.safe_open(path, "np", backend="pread").get_slice("a")[:, 0]
before, found = held(), {}
for name, read in json.loads(sys.argv[1]).items():
    # Made of a text here, and not in the call: Python ends with what interrupted an `eval`, caught or not.
    how = interrupted("rchar", eval("lambda: " + read))
    found[name] = [how, settled(before) == before or held()]
say(found)
"""
    found = run(INTERRUPTED + program, json.dumps(LONG_READS), folder=path.parent).said()
    assert found == {name: ["interrupted", True] for name in LONG_READS}


# What replaces the file `model.safetensors`, with 2 GiB and more.
LONG_SAVES = {
    "digests": 'ingot.numpy.save_file({"a": array}, path, checksums="blake3")',
    "put in order": 'ingot.numpy.save_file({"a": array.reshape(2, -1).T}, path)',
    "buffers": 'ingot.serialize_file({"a": {"dtype": "U8", "shape": [2 << 30], "data": array}}, path)',
    "merge": 'ingot.merge([path, "large.safetensors"], path)',
    "rewrite": 'ingot.rewrite("large.safetensors", path)',
    "split": 'ingot.split("large.safetensors", "shards", "100MB")',
    "metadata": 'ingot.update_metadata("large.safetensors", set={"k": "v"})',
    "tensor": 'ingot.replace_tensor("large.safetensors", "small", numpy.ones(5))',
    "stream": 'ingot.write_to(null, {"a": array})',
    "appender": "append()",
    "writer": "fill()",
}


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
def test_ctrl_c_ends_whatever_writes_for_long_and_leaves_nothing(path: Path) -> None:
    space = os.statvfs(path.parent)
    if space.f_bavail * space.f_frsize < 9 << 30:
        pytest.skip(f"less than 9 GiB are free below {path.parent}")
    ingot.numpy.save_file({"b": ARRAY}, path)
    large = b'{"large":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},' % (4 << 30, 4 << 30)
    large += b'"small":{"dtype":"F64","shape":[5],"data_offsets":[%d,%d]}}' % (4 << 30, (4 << 30) + 40)
    file_of(large, (4 << 30) + 40, path.parent / "large.safetensors")
    program = """
import ingot._edit, ingot._rearrange, ingot._shards, ingot._save, ingot._writer
path, array = "model.safetensors", numpy.zeros(2 << 30, numpy.uint8)
ingot.numpy.save({"a": numpy.ones((2, 2)).T})
null = open("/dev/null", "wb", buffering=0)

def append():
    with ingot.Writer(path, reserve=1000) as writer:
        writer.write("a", array)
        writer.commit()

def fill():
    with ingot.Writer(path, {"a": ("U8", [2 << 30])}) as writer:
        writer.write("a", array)
        writer.commit()

def files():
    return {os.path.join(folder, name): os.stat(os.path.join(folder, name)).st_mtime_ns
            for folder, _, names in os.walk(".") for name in names}

before, stood, found = held(), files(), {}
for name, write in json.loads(sys.argv[1]).items():
    how = interrupted("wchar", eval("lambda: " + write))
    found[name] = [how, settled(before) == before or held(), files() == stood or sorted(files())]
say(found)
"""
    found = run(INTERRUPTED + program, json.dumps(LONG_SAVES), folder=path.parent).said()
    assert found == {name: ["interrupted", True, True] for name in LONG_SAVES}


def test_ctrl_c_ends_a_snapshot(tmp_path: Path) -> None:
    program = """
import ingot._background
# Pages that nobody has written to take no memory, but their copies do.
array = numpy.zeros(2 << 30, numpy.uint8)
holds = held()
forget_peak()
before = memory("VmRSS")

def interrupt():
    while memory("VmHWM") - before < 64 << 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    ingot.numpy.save_file({"a": array}, "model.safetensors", background=True)
except KeyboardInterrupt:
    say([memory("VmHWM") - before < 1 << 30, settled(holds) == holds or held(), os.listdir()])
"""
    assert run(program, folder=tmp_path).said() == [True, True, []]


def test_bytes_take_memory_as_they_are_filled_and_not_before(tmp_path: Path) -> None:
    # Memory that is touched when it is made is touched while no other thread can run.
    program = """
import ingot._native
nbytes, taken = 256 << 20, []
before = memory("VmRSS")

def fetch(begin, end):
    taken.append(memory("VmRSS") - before)
    return numpy.full(end - begin, 7, numpy.uint8)

whole = ingot._native.serialize({"a": 0}, lambda name, _: ("U8", [nbytes], fetch), None, "safetensors")
say([taken[0] < 64 << 20, taken[-1] > 192 << 20, whole[-nbytes:] == bytes([7]) * nbytes])
"""
    assert run(program, folder=tmp_path).said() == [True, True, True]


def test_ctrl_c_ends_a_save_to_memory(tmp_path: Path) -> None:
    program = """
# Put in order while it is copied, which takes long.
array = numpy.zeros((1 << 15, 1 << 15), numpy.uint8)
ingot.numpy.save({"a": array[:2, :2].T})
handler, heard = signal.getsignal(signal.SIGINT), []
asked = time.monotonic()

def note(*arguments):
    heard.append(time.monotonic() - asked)
    handler(*arguments)

signal.signal(signal.SIGINT, note)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for _ in range(1000):
        ingot.numpy.save({"a": array.T})
except KeyboardInterrupt:
    say(len(heard))
"""
    assert run(program, folder=tmp_path).said() == 1


def test_ctrl_c_while_a_background_save_is_awaited_leaves_it_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = """
saved = ingot.numpy.save_file({"a": numpy.ones(3)}, "fifo", background=True)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    saved.result()
except KeyboardInterrupt:
    threading.Thread(target=lambda: open("fifo", "rb").read()).start()
    say([saved.result(60), saved.done()])
"""
    assert run(program, folder=tmp_path).said() == [None, True]


def test_ctrl_c_ends_a_save_that_waits_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = """
import _thread
tensors = {"a": numpy.ones(3)}
ingot.numpy.save(tensors)
# The other thread runs once the main one waits in the save: until then that has the GIL.
sys.setswitchinterval(1e6)
try:
    _thread.start_new_thread(os.kill, (os.getpid(), signal.SIGINT))
    ingot.numpy.save_file(tensors, "fifo")
except KeyboardInterrupt:
    say("interrupted")
"""
    assert run(program, folder=tmp_path).said() == "interrupted"


# Memory


def empty(number: int, shape: str = "0") -> str:
    """An entry of a header, for a tensor without elements."""
    return f'"{number:x}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}'


OPENED = """
with open("model.safetensors", "rb") as file:
    nbytes = int.from_bytes(file.read(8), "little")
gc.collect()
forget_peak()
before = memory("VmRSS")
file = ingot.safe_open("model.safetensors", "np")
peak, after = memory("VmHWM"), memory("VmRSS")
say([len(file), len(file.metadata() or {}), nbytes, peak - before, after - before])
"""


def opened_at(path: Path, times: float = 4) -> tuple[int, int]:
    """The numbers of tensors and of metadata keys. Opening must take at most `times` the header."""
    tensors, keys, nbytes, peak, after = run(OPENED, folder=path.parent).said()
    print(f"peak {peak / nbytes:.2f} times the header, {after / nbytes:.2f} held")
    assert peak <= times * nbytes
    return tensors, keys


def test_a_header_of_many_empty_tensors_takes_little_memory(path: Path) -> None:
    count = 1_750_000
    entries = map(empty, range(count))
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    assert path.stat().st_size > 94_000_000
    assert opened_at(path) == (count, 0)


@pytest.mark.parametrize("spelled", ["compact", "spaced"])
def test_a_header_of_many_metadata_keys_takes_little_memory(path: Path, spelled: str) -> None:
    # Where white space stands between the tokens, another parser reads it.
    pair, count = ('"%x":""', 8_000_000) if spelled == "compact" else ('"%x" : ""', 7_000_000)
    pairs = ",".join(pair % number for number in range(count))
    file_of(('{"__metadata__":{' + pairs + "}}").encode(), 0, path)
    assert path.stat().st_size > 80_000_000
    assert opened_at(path) == (0, count)


def test_a_header_of_many_tensors_out_of_order_takes_little_memory(path: Path) -> None:
    # As above, but read by the careful parser: with white space, and other keys before the usual ones.
    count = 1_200_000
    entries = (
        f'"{number * 7919 % count:07}" : {{"shape" : [0], "data_offsets":[0,0], "dtype":"U8" }}'
        for number in range(count)
    )
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    assert opened_at(path) == (count, 0)


@pytest.mark.parametrize(("rank", "count"), [(100, 300_000), (40_000_000, 1)])
def test_a_header_of_long_shapes_takes_a_little_more_memory(path: Path, rank: int, count: int) -> None:
    shape = ",".join("0" * rank)
    entries = (empty(number, shape) for number in range(count))
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    # A dimension is held in 8 bytes and may take 2 in the file: 4 times, beside the header itself.
    assert opened_at(path, 5.1) == (count, 0)


def test_a_bt_header_of_many_tensors_takes_no_more_memory_than_the_limit(path: Path) -> None:
    # An entry of a `.bt` file may take 9 bytes, so what bounds the memory is a limit that upstream has too:
    # what is read may take 100 MB. The header itself comes on top.
    count = 1_500_000
    spec = {"dtype": "U8", "shape": [0], "data": b""}
    path.write_bytes(ingot.serialize({f"{number:x}": spec for number in range(count)}, format="bintensors"))
    tensors, _, nbytes, peak, _ = run(OPENED, folder=path.parent).said()
    assert tensors == count
    assert peak <= 100_000_000 + nbytes


@pytest.mark.parametrize("refused", ["duplicate", "unknown dtype", "cut"])
def test_a_large_header_that_is_refused_takes_little_memory(path: Path, refused: str) -> None:
    count = 1_750_000
    entries = [empty(number) for number in range(count)]
    if refused == "duplicate":
        entries[-1] = entries[0]
    elif refused == "unknown dtype":
        entries[-1] = entries[-1].replace("U8", "U9")
    text = "{" + ",".join(entries) + ("" if refused == "cut" else "}")
    file_of(text.encode(), 0, path)
    opening = 'file = ingot.safe_open("model.safetensors", "np")'
    refusal = """
try:
    ingot.safe_open("model.safetensors", "np")
except ingot.HeaderError as fault:
    file = {}
    assert len(str(fault)) < 1000
"""
    program = OPENED.replace(opening, refusal).replace("file.metadata() or {}", "{}")
    _, _, nbytes, peak, after = run(program, folder=path.parent).said()
    print(f"peak {peak / nbytes:.2f} times the header, {after / nbytes:.2f} held")
    assert peak <= 4 * nbytes
    assert after <= nbytes / 2


def test_loading_by_pread_takes_the_tensors_and_little_more(path: Path) -> None:
    tensors = {f"t{number}": numpy.ones(4 << 20, numpy.uint8) for number in range(32)}
    ingot.numpy.save_file(tensors, path)
    program = """
forget_peak()
before = memory("VmRSS")
loaded = ingot.numpy.load_file("model.safetensors", backend="pread")
say((memory("VmHWM") - before) / (128 << 20))
"""
    assert run(program, folder=path.parent).said() < 1.2


@pytest.mark.parametrize("durable", [True, False])
def test_saving_a_file_takes_little_memory_whatever_is_in_it(tmp_path: Path, durable: bool) -> None:
    program = """
durable = sys.argv[1] == "True"
def taken(array):
    # What the first save ever takes, such as the stacks of threads, is not its.
    ingot.numpy.save_file({"a": array[:64, :64]}, "t", durable=durable)
    forget_peak()
    before = memory("VmRSS")
    ingot.numpy.save_file({"a": array}, "t", durable=durable)
    return (memory("VmHWM") - before) >> 20

array = numpy.ones((8192, 16384), numpy.float32)
say([taken(array), taken(array.T), taken(array[::-1]), taken(array.view(">f4"))])
"""
    # The array has 512 MiB.
    assert max(run(program, durable, folder=tmp_path).said()) < 64


def test_ctrl_c_ends_a_save_of_what_python_fetches(tmp_path: Path) -> None:
    program = """
array = numpy.zeros((1 << 13, 1 << 13), ">f4")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        ingot.numpy.save_file({"a": array.T}, "t")
        os.unlink("t")
except KeyboardInterrupt:
    say([thread.name for thread in threading.enumerate()])
"""
    assert run(program, folder=tmp_path).said() == ["MainThread"]
    assert set(os.listdir(tmp_path)) <= {"t"}


LEAKS = """
backend, framework = sys.argv[1:]
if framework == "pt":
    import ingot.torch
def cycle():
    file = ingot.safe_open("model.safetensors", framework, backend=backend)
    tensors, part = file.get_tensors(), file.get_slice("a")
    part[::2], part[1:3], file.keys(), file.metadata(), file.info("a")
    for wrong in (lambda: file["nope"], lambda: part[99], lambda: ingot.safe_open("broken", framework)):
        try:
            wrong()
        except ingot.SafetensorError:
            pass
    data = ingot.numpy.save({"a": numpy.ones(20_000)}, {"k": "v"})
    ingot.numpy.load(data), ingot.deserialize(data)
    ingot.numpy.save_file({"a": numpy.ones(20_000)}, "saved")

def measured(cycles):
    for _ in range(cycles):
        cycle()
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("model.safetensors" in line for line in maps)
    return descriptors(), mapped, memory("VmRSS")

first = measured(200)
last = measured(1500)
say([first[0], last[0], first[1], last[1], last[2] - first[2]])
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_opening_and_saving_again_and_again_leaks_nothing(path: Path, backend: str, framework: str) -> None:
    ingot.numpy.save_file({"a": numpy.ones((100, 100)), "b": numpy.ones(20_000)}, path, {"k": "v"})
    (path.parent / "broken").write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    before, after, mapped, still_mapped, grown = run(LEAKS, backend, framework, folder=path.parent).said()
    assert before == after
    assert mapped == still_mapped == 0
    # 1500 leaked files of 240 kB would be 360 MB, 1500 leaked messages still some.
    assert grown < 4 << 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_collected_is_closed(path: Path, backend: str) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
def state():
    with open("/proc/self/maps") as maps:
        mapped = sum("model.safetensors" in line for line in maps)
    with os.scandir("/proc/self/fd") as links:
        targets = [os.readlink(link.path) for link in links if os.path.islink(link.path)]
    opened = sum("model.safetensors" in target for target in targets)
    return [opened, mapped]

mapping = int(sys.argv[1] == "mmap")
assert state() == [0, 0]
file = ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])
assert state() == [1, mapping], state()
array = file["a"]
del file
# The array needs the mapping, and nobody the descriptor.
assert state() == [0, mapping], state()
view = array[1:]
del array
assert state() == [0, mapping], state()
del view
assert state() == [0, 0], state()
file = ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])
part = file.get_slice("a")
file.close()
assert state() == [1, mapping], state()
assert part[0].tolist() == [0, 1, 2, 3]
del part
assert state() == [0, 0], state()
cycle = [ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])]
cycle.append(cycle)
del cycle
gc.collect()
assert state() == [0, 0], state()
say("closed")
"""
    assert run(program, backend, folder=path.parent).said() == "closed"


ROUND_TRIP = """
import ingot.torch, torch, ml_dtypes
dtypes, shapes = ("u1", "<f4", ">f8", "?", ml_dtypes.bfloat16), ((), (0, 3), (5, 7))
arrays = {f"{dtype}-{shape}": numpy.ones(shape, dtype) for dtype in dtypes for shape in shapes}
arrays["f"] = numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4))
for format in ("safetensors", "bintensors"):
    data = ingot.numpy.save(arrays, {"k": "v"}, format=format)
    assert all((array == arrays[name]).all() for name, array in ingot.numpy.load(data).items())
    assert ingot.torch.save(ingot.torch.load(data), {"k": "v"}, format=format) == data
    ingot.numpy.save_file(arrays, "t", {"k": "v"}, format=format)
    with open("t", "rb") as file:
        assert file.read() == data
    for backend in ("mmap", "pread"):
        for framework in ("np", "pt"):
            with ingot.safe_open("t", framework, backend=backend) as file:
                tensors = file.get_tensors()
                part = file.get_slice("f")
            del file
            gc.collect()
            assert part[::2, 1:3].tolist() == arrays["f"][::2, 1:3].tolist()
            assert part[[0, 2]].tolist() == arrays["f"][[0, 2]].tolist()
            tensors["f"][0] = 9
        for broken in (data[:-1], data[:20], b"", data + b"x", data[:8] + bytes(len(data) - 8)):
            with open("broken", "wb") as file:
                file.write(broken)
            for load in (ingot.numpy.load, lambda _: ingot.torch.load_file("broken", backend=backend)):
                try:
                    load(broken)
                    assert False
                except ingot.HeaderError as fault:
                    str(fault)
say("came back")
"""


@pytest.mark.parametrize(
    "variables", [{"PYTHONMALLOC": "debug"}, {"PYTHONDEVMODE": "1", "MALLOC_PERTURB_": "165"}]
)
def test_a_round_trip_survives_debugging_allocators(tmp_path: Path, variables: dict[str, str]) -> None:
    ended: Ended = run(ROUND_TRIP, folder=tmp_path, **variables)
    assert ended.said() == "came back"
    assert "ResourceWarning" not in ended.err


def test_the_extension_is_unloaded_in_good_order(path: Path) -> None:
    # Handles, slices and tensors that live until the interpreter ends.
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
import ingot.torch
keep = []
for backend in ("mmap", "pread"):
    for framework in ("np", "pt"):
        file = ingot.safe_open("model.safetensors", framework, backend=backend)
        keep += [file, file.get_slice("a"), file["a"], iter(file), file.items()]
keep.append(keep)
sys.keep = keep
def load():
    while True:
        ingot.numpy.load_file("model.safetensors", backend="pread")
threading.Thread(target=load, daemon=True).start()
say("ends")
"""
    ended = run(program, folder=path.parent)
    assert ended.said() == "ends"
    assert ended.err == ""


if sys.platform != "linux":
    pytest.skip("limits and /proc as Linux has them", allow_module_level=True)
