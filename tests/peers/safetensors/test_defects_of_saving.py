"""What goes wrong with safetensors and bintensors while a file is saved, and does not with ingot.

One test for each defect. Its docstring says what upstream does; `#N` is an issue of safetensors.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from defects import ARRAY

import ingot
import ingot.numpy
import ingot.torch
from support.processes import NOBODY, run


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_can_be_read_by_others_as_the_umask_says(path: Path) -> None:
    """0.8.0 creates every file with mode 0600, so other users find no model (#782)."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    assert mode(path) == "0o644"
    os.umask(0o007)
    ingot.torch.save_file({"a": torch.zeros(3)}, path.with_suffix(".bt"))
    assert mode(path.with_suffix(".bt")) == "0o660"


READ_ONLY = """
become_nobody()
found = []
for options in ({}, {"atomic": False}, {"write_options": {"replace_read_only": True}}):
    try:
        found.append(ingot.numpy.save_file({"a": numpy.ones(3)}, "t", **options))
    except PermissionError as fault:
        found.append([fault.filename, os.stat("t").st_size])
say([*found, ingot.numpy.load_file("t")["a"].tolist()])
"""


def read_only_file(folder: Path) -> Path:
    """A folder with a file that whoever `become_nobody` makes us may not write to, though to the folder."""
    (folder / "t").touch()
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.chown(folder / "t", NOBODY, NOBODY)
    (folder / "t").chmod(0o444)
    return folder


def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    """0.8.0 replaces it without a word."""
    found = run(READ_ONLY, folder=read_only_file(tmp_path)).said()
    assert found == [["t", 0], ["t", 0], None, [1, 1, 1]]
    assert mode(tmp_path / "t") == "0o444"


def test_owner_group_and_extended_attributes_pass_on(path: Path) -> None:
    """0.8.0 loses all of them: the file belongs to whoever saved last."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    try:
        os.setxattr(path, "user.note", b"mine")
    except OSError as fault:
        pytest.skip(f"no extended attributes on the file system of {path.parent}: {fault}")
    owner = (path.stat().st_uid, path.stat().st_gid)
    ingot.numpy.save_file({"a": ARRAY + 1}, path)
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert os.getxattr(path, "user.note") == b"mine"


def test_a_failed_save_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """0.8.0 names its temporary file, or none, and raises no `OSError`."""
    missing = tmp_path / "missing" / "model.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        ingot.numpy.save_file({"a": ARRAY}, missing)
    assert caught.value.filename == str(missing)
    with pytest.raises(IsADirectoryError) as directory:
        ingot.numpy.save_file({"a": ARRAY}, tmp_path)
    assert directory.value.filename == str(tmp_path)
    program = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    ingot.numpy.save_file({"a": numpy.zeros(100_000)}, "model.safetensors")
except ingot.StorageError as fault:
    say([str(fault), fault.errno, fault.filename, os.listdir()])
"""
    message, number, filename, left = run(program, folder=tmp_path).said()
    assert message.startswith("model.safetensors: could not ")
    assert "800" in message
    assert number == errno.EFBIG
    assert filename == "model.safetensors"
    assert left == []


def test_the_same_tensors_give_the_same_file() -> None:
    """0.8.0 writes metadata in the order of a seeded hash: five saves, five hashes (#584)."""
    metadata = {str(number): str(number * number) for number in range(16)}
    tensors = dict.fromkeys("abc", ARRAY)
    files = {
        ingot.numpy.save(dict(order(tensors.items())), dict(order(metadata.items())))
        for order in (list, reversed)
        for _ in range(4)
    }
    assert len(files) == 1
    program = """
import hashlib
array = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
metadata = {str(number): str(number * number) for number in range(16)}
say(hashlib.sha256(ingot.numpy.save({name: array for name in set("abc")}, metadata)).hexdigest())
"""
    digest = hashlib.sha256(files.pop()).hexdigest()
    assert [run(program, PYTHONHASHSEED=seed).said() for seed in ("1", "2")] == [digest, digest]


def test_nothing_is_written_before_everything_is_known_to_fit(path: Path) -> None:
    """Names and metadata that no header can hold: upstream too refuses them first."""
    path.write_bytes(b"old")
    for tensors, metadata in (
        ({"\ud800": ARRAY}, None),
        ({"a": ARRAY}, {"\ud800": ""}),
        ({"a": ARRAY}, {"k": 1}),
        ({1: ARRAY}, None),
        ({"a": ARRAY}, {"k": "x" * 100_000_000}),
        ({"a": "text"}, None),
    ):
        with pytest.raises((TypeError, ValueError)):
            ingot.numpy.save_file(tensors, path, metadata)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_memory_is_never_taken_by_its_address() -> None:
    """0.8.0 takes a number for an address and reads there: a wrong one is a SIGSEGV."""
    for data in (0, 4096, None, "text"):
        with pytest.raises(TypeError, match="`a`"):
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": data}})
    for nbytes in (0, 4095, 4097):
        with pytest.raises(ingot.SaveError, match="`a`") as caught:
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": bytes(nbytes)}})
        assert f"needs 4096 bytes, the buffer has {nbytes}" in str(caught.value)


def test_saving_to_bytes_holds_the_tensors_once_more() -> None:
    """0.8.0 holds them twice more."""
    grown = run("""
array = numpy.ones(64 << 20, numpy.uint8)
forget_peak()
before = memory("VmRSS")
data = ingot.numpy.save({"a": array})
say((memory("VmHWM") - before) / array.nbytes)
""").said()
    assert grown < 1.25


def test_others_run_while_a_file_is_written(tmp_path: Path) -> None:
    """0.7.0 holds the GIL while it writes: nobody in the process could empty a FIFO that it writes into."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[int] = []

    def drain() -> None:
        with fifo.open("rb") as file:
            while part := file.read(1 << 16):
                received.append(len(part))

    reader = threading.Thread(target=drain)
    reader.start()
    ingot.numpy.save_file({"a": numpy.zeros(8 << 20, numpy.uint8)}, fifo)
    reader.join()
    # 0.8.0 puts a file in its place.
    assert fifo.is_fifo()
    assert sum(received) > 8 << 20


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_others_run_while_a_file_is_read(path: Path, framework: str) -> None:
    """0.8.0 holds the GIL while it reads: other threads stall for 53 ms with a tensor of 64 MiB."""
    ingot.numpy.save_file({"a": numpy.zeros(16 << 20, numpy.uint8)}, path)
    before = sys.getswitchinterval()
    ran = threading.Event()
    go = threading.Lock()
    go.acquire()

    def other() -> None:
        go.acquire()
        ran.set()

    thread = threading.Thread(target=other)
    with ingot.safe_open(path, framework, backend="pread") as file:
        thread.start()
        # From here on another thread runs only when this one gives way by itself, as only reading does.
        sys.setswitchinterval(1e6)
        try:
            go.release()
            for _ in range(1000):
                file.get_tensors()
                if ran.is_set():
                    break
            assert ran.is_set()
        finally:
            sys.setswitchinterval(before)
    thread.join()
