"""What goes wrong with safetensors and bintensors while a file is opened, and does not with ingot.

One test for each defect. Its docstring says what upstream does; `#N` is an issue of safetensors.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import torch
from defects import ARRAY, entry, file_of

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


FORBIDDEN = """
# Imported now: another user may not be able to read the checkout.
open = ingot.safe_open
become_nobody()
try:
    open("secret", "np")
except OSError as fault:
    say([type(fault).__name__, fault.errno, fault.filename])
"""


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    """0.8.0: FileNotFoundError, though it is there."""
    (tmp_path / "secret").write_bytes(ingot.numpy.save({"a": ARRAY}))
    (tmp_path / "secret").chmod(0)
    tmp_path.chmod(0o755)
    assert run(FORBIDDEN, folder=tmp_path).said() == ["PermissionError", errno.EACCES, "secret"]


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


def test_the_order_of_a_zero_dimension_does_not_matter() -> None:
    """0.8.0 takes [0, 2**62, 4] and refuses [2**62, 4, 0]."""
    for shape in ([0, 2**62, 4], [2**62, 0, 4], [2**62, 4, 0]):
        with pytest.raises(ingot.HeaderError, match="overflows") as caught:
            ingot.numpy.load(file_of({"a": entry("U8", shape, 0, 0)}))
        assert caught.value.tensor == "a"


@pytest.mark.parametrize("nesting", ["[", '{"a":', '{"__metadata__":{"a":['])
def test_a_header_of_brackets_is_refused(nesting: str) -> None:
    """As upstream: no header is deep enough to exhaust the stack."""
    for text in (nesting * 1_000_000, '{"a":{"dtype":"U8","x":' + nesting * 1_000_000):
        with pytest.raises(ingot.HeaderError):
            ingot.numpy.load(file_of(text.encode()))
