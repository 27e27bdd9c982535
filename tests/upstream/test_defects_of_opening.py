"""What goes wrong with safetensors and bintensors while a file is opened, and does not with ingot.

One test for each defect; its docstring says what upstream does. Where the wheel can be made to show it, a
function marked `defect` does so beside it, and test_upstream_still_does_this.py asserts what it gives. `#N`
is an issue of safetensors.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import bintensors
import bintensors.numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from defects import ARRAY, defect, entry, file_of, raised

import ingot
import ingot.numpy
import ingot.torch
from support.processes import run
from vectors.case import Vector, vectors


def vector(name: str) -> Vector:
    return next(vector for vector in vectors() if vector.name == name)


def test_a_directory_says_that_it_is_one(tmp_path: Path) -> None:
    """0.8.0: OSError, No such device (os error 19) (#485)."""
    for load in (ingot.numpy.load_file, ingot.torch.load_file, lambda path: ingot.safe_open(path, "np")):
        with pytest.raises(IsADirectoryError) as caught:
            load(tmp_path)
        assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))


@defect("OSError: No such device (os error 19)")
def opening_a_directory(folder: Path) -> str:
    return raised(lambda: safetensors.numpy.load_file(folder))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """0.8.0 waits for ever for somebody to write to a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for special in (fifo, tmp_path / "socket", Path("/dev/zero"), Path("/dev/null")):
            for backend in ("auto", "mmap", "pread"):
                with pytest.raises(OSError, match=r".") as caught:
                    ingot.safe_open(special, "np", backend=backend)
                assert caught.value.filename == str(special)
                assert caught.value.errno in (errno.EINVAL, errno.ENXIO)


@defect(True)
def opening_a_fifo_waits_for_a_writer(folder: Path) -> bool:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    program = "import safetensors, sys; safetensors.safe_open(sys.argv[1], 'np')"
    with Popen([sys.executable, "-c", program, fifo], stderr=DEVNULL) as opener:
        # Opening for writing without waiting succeeds only where somebody waits to read.
        while opener.poll() is None:
            try:
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
            return True
    return False


def paths_that_cannot_be_opened(folder: Path) -> dict[type[OSError], Path]:
    (folder / "loop").symlink_to("loop")
    (folder / "file").touch()
    return {
        FileNotFoundError: folder / "missing",
        NotADirectoryError: folder / "file" / "below",
        OSError: folder / "loop",
    }


def test_the_system_says_why_a_file_cannot_be_opened(tmp_path: Path) -> None:
    """0.8.0 raises FileNotFoundError for all of them, without an errno."""
    found = {}
    for kind, path in paths_that_cannot_be_opened(tmp_path).items():
        with pytest.raises(kind) as caught:
            ingot.safe_open(path, "np")
        assert caught.value.filename == str(path)
        assert not isinstance(caught.value, ingot.SafetensorError)
        found[caught.value.errno] = type(caught.value)
    with pytest.raises(OSError, match="too long") as caught:
        ingot.safe_open(tmp_path / ("x" * 300), "np")
    found[caught.value.errno] = type(caught.value)
    assert found == {
        errno.ENOENT: FileNotFoundError,
        errno.ENOTDIR: NotADirectoryError,
        errno.ELOOP: OSError,
        errno.ENAMETOOLONG: OSError,
    }


@defect([("FileNotFoundError", None)] * 4)
def classes_of_what_cannot_be_opened(folder: Path) -> list[tuple[str, int | None]]:
    found = []
    for path in (*paths_that_cannot_be_opened(folder).values(), folder / ("x" * 300)):
        with pytest.raises(OSError, match=r".") as caught:
            safetensors.safe_open(path, "np")
        found.append((type(caught.value).__name__, caught.value.errno))
    return found


FORBIDDEN = """
import safetensors
# Imported now: another user may not be able to read the checkout.
openers = safetensors.safe_open, ingot.safe_open
become_nobody()
for open in openers:
    try:
        open("secret", "np")
    except OSError as fault:
        found = [type(fault).__name__, fault.errno, fault.filename]
    if open.__module__.startswith(sys.argv[1]):
        break
say(found)
"""


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    """0.8.0: FileNotFoundError, though it is there."""
    (tmp_path / "secret").write_bytes(ingot.numpy.save({"a": ARRAY}))
    (tmp_path / "secret").chmod(0)
    tmp_path.chmod(0o755)
    assert run(FORBIDDEN, "ingot", folder=tmp_path).said() == ["PermissionError", errno.EACCES, "secret"]


@defect(["FileNotFoundError", None, None])
def opening_a_file_that_may_not_be_read(folder: Path) -> list[Any]:
    (folder / "secret").touch(0)
    folder.chmod(0o755)
    return run(FORBIDDEN, "builtins", folder=folder).said()


def test_a_path_may_be_bytes_and_need_not_be_text(tmp_path: Path) -> None:
    """0.8.0 refuses bytes; its torch side refuses names that are not UTF-8."""
    path = os.fsencode(tmp_path) + b"/mod\xff\xfeel.safetensors"
    for spell in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        ingot.torch.save_file({"a": torch.arange(3)}, spell)
        assert ingot.torch.load_file(spell)["a"].tolist() == [0, 1, 2]
        with ingot.safe_open(spell, "np") as file:
            assert os.fsencode(file.path) == path
            assert file["a"].tolist() == [0, 1, 2]
            with pytest.raises(ingot.TensorNotFoundError) as caught:
                file.get_tensor("nope")
        assert os.fsencode(caught.value.path or "") == path
        str(caught.value).encode()
    with pytest.raises(FileNotFoundError):
        ingot.safe_open(path + b"?", "np")


@defect("TypeError: argument 'filename': 'bytes' object is not an ins")
def opening_by_bytes(folder: Path) -> str:
    return raised(lambda: safetensors.safe_open(b"t", "np"))


def test_a_path_with_a_nul_is_a_value_error() -> None:
    """0.8.0: FileNotFoundError."""
    for path in ("a\0b", b"a\0b", Path("a\0b")):
        for call in (
            lambda path: ingot.safe_open(path, "np"),
            ingot.numpy.load_file,
            ingot.torch.load_file,
            lambda path: ingot.numpy.save_file({"a": ARRAY}, path),
            lambda path: ingot.torch.save_file({"a": torch.zeros(2)}, path),
            lambda path: ingot.serialize_file({}, path),
        ):
            with pytest.raises(ValueError, match="null") as caught:
                call(path)
            assert not isinstance(caught.value, OSError)


@defect("FileNotFoundError: No such file or directory: a\0b")
def opening_a_path_with_a_nul(folder: Path) -> str:
    return raised(lambda: safetensors.safe_open("a\0b", "np"))


FOREIGN = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 90868376\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>" + b" " * 200,
    "ZIP": b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(200),
    "PyTorch": b"PK\x03\x04\0\0\x08\x08\0\0" + bytes(16) + b"\x10\0\x12\0archive/data.pkl" + bytes(200),
    "pickle": b"\x80\x02}q\0(X\x01\0\0\0aq\x01K\x01u." + bytes(50),
    "GGUF": b"GGUF\x03\0\0\0" + bytes(100),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "npy": b"\x93NUMPY\x01\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n" + bytes(60),
    "index": b'{"metadata": {"total_size": 1}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}',
}


@pytest.mark.parametrize("kind", sorted(FOREIGN.keys() - {"index"}))
def test_another_kind_of_file_is_recognised(path: Path, kind: str) -> None:
    """0.8.0: header too large, or the like, and no path (#414)."""
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ingot.HeaderError, match=kind) as caught:
        ingot.torch.load_file(path)
    assert caught.value.code == "foreign-file"
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(ingot.HeaderError, match=kind):
        ingot.numpy.load(FOREIGN[kind])


def test_an_index_is_opened_as_one_under_any_name_and_is_none_of_tensors(path: Path) -> None:
    """0.8.0: header too large."""
    path.write_bytes(FOREIGN["index"])
    with pytest.raises(
        FileNotFoundError, match="1 of the 1 files that the index names are not there"
    ) as caught:
        ingot.torch.load_file(path)
    assert "model-00001-of-00002.safetensors" in str(caught.value)
    with pytest.raises(ingot.HeaderError, match="index") as refused:
        ingot.numpy.load(FOREIGN["index"])
    assert refused.value.code == "foreign-file"


@defect(["header too large"] * 9)
def what_is_said_of_other_kinds_of_file(folder: Path) -> list[str]:
    said = []
    for data in FOREIGN.values():
        with pytest.raises(safetensors.SafetensorError) as caught:
            safetensors.numpy.load(data)
        said.append(str(caught.value).rpartition(": ")[2])
    return said


WORDS = [
    ("header-far-past-the-end", ["99999999 bytes after the first 8", "found 2"]),
    ("name-twice-with-two-dtypes", ["`a`"]),
    ("name-twice-by-escape", ["`a`"]),
    ("metadata-key-twice", ["`k`"]),
    ("metadata-key-twice-by-escape", ["`k`"]),
    ("nul-padding", ["NUL"]),
    ("range-too-short", ["`a`", "24", "20", "[2, 3]", "F32"]),
    ("hole-in-the-middle", ["`b`", "1", "2"]),
    ("data-one-byte-short", ["`a`", "2", "1"]),
]


@pytest.mark.parametrize(("name", "words"), WORDS)
def test_a_broken_file_is_described(path: Path, name: str, words: list[str]) -> None:
    """0.8.0 names no file, seldom a tensor, and no numbers."""
    path.write_bytes(vector(name).file())
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.numpy.load_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message.removeprefix(str(path))] == []
    assert caught.value.code == vector(name).code


@defect(False)
def the_file_is_named(folder: Path) -> bool:
    path = folder / "model.safetensors"
    path.write_bytes(vector("range-too-short").file())
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.numpy.load_file(path)
    return "model" in str(caught.value)


AMBIGUOUS = {
    "name-twice-with-two-dtypes": "duplicate-tensor",
    "name-twice-by-escape": "duplicate-tensor",
    "metadata-key-twice": "duplicate-metadata-key",
    "metadata-key-twice-by-escape": "duplicate-metadata-key",
    "entry-as-array": "invalid-entry",
    "dtype-as-map": "invalid-entry",
    "zero-dimension-order-first": "size-overflow",
    # bintensors 0.2.0
    "bt-metadata-key-twice": "duplicate-metadata-key",
    "bt-padding-hides-two-kilobytes": "invalid-padding",
    "bt-padding-is-a-second-list": "invalid-padding",
    "bt-number-small-in-three-bytes": "invalid-varint",
    "bt-count-not-shortest": "invalid-varint",
    "bt-zero-dimension-order-first": "size-overflow",
}


@pytest.mark.parametrize(("name", "code"), AMBIGUOUS.items())
def test_a_file_that_means_two_things_is_refused(path: Path, name: str, code: str) -> None:
    """0.8.0 takes the last of two; bintensors 0.2.0 skips bytes behind its entries and reads long varints."""
    path.write_bytes(vector(name).file())
    for backend in ("mmap", "pread"):
        with pytest.raises(ingot.HeaderError) as caught:
            ingot.safe_open(path, "np", backend=backend)
        assert caught.value.code == code
    with pytest.raises(ingot.HeaderError):
        ingot.torch.load(path.read_bytes())


@defect(dict.fromkeys(AMBIGUOUS, True))
def files_that_mean_two_things_are_read(folder: Path) -> dict[str, bool]:
    libraries = {"safetensors": safetensors.deserialize, "bintensors": bintensors.deserialize}
    read = {name: libraries[vector(name).format] for name in AMBIGUOUS}
    return {
        name: raised(lambda name=name: read[name](vector(name).file())) == "nothing" for name in AMBIGUOUS
    }


def test_the_order_of_a_zero_dimension_does_not_matter() -> None:
    """0.8.0 takes [0, 2**62, 4] and refuses [2**62, 4, 0]."""
    for shape in ([0, 2**62, 4], [2**62, 0, 4], [2**62, 4, 0]):
        with pytest.raises(ingot.HeaderError, match="overflows") as caught:
            ingot.numpy.load(file_of({"a": entry("U8", shape, 0, 0)}))
        assert caught.value.tensor == "a"


@defect([True, False])
def orders_of_a_zero_dimension(folder: Path) -> list[bool]:
    shapes = ([0, 2**63, 4], [2**63, 4, 0])
    files = [file_of({"a": entry("U8", shape, 0, 0)}) for shape in shapes]
    return [raised(lambda file=file: safetensors.deserialize(file)) == "nothing" for file in files]


@pytest.mark.parametrize("nesting", ["[", '{"a":', '{"__metadata__":{"a":['])
def test_a_header_of_brackets_is_refused(nesting: str) -> None:
    """As upstream: no header is deep enough to exhaust the stack."""
    for text in (nesting * 1_000_000, '{"a":{"dtype":"U8","x":' + nesting * 1_000_000):
        with pytest.raises(ingot.HeaderError):
            ingot.numpy.load(file_of(text.encode()))
