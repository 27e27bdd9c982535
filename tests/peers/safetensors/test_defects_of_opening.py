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
from defects import ARRAY, file_of

import ingot
import ingot.numpy
import ingot.torch
from support.processes import run
from vectors.case import Vector, vectors


def vector(name: str) -> Vector:
    return next(vector for vector in vectors() if vector.name == name)


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


@pytest.mark.parametrize("nesting", ["[", '{"a":', '{"__metadata__":{"a":['])
def test_a_header_of_brackets_is_refused(nesting: str) -> None:
    """As upstream: no header is deep enough to exhaust the stack."""
    for text in (nesting * 1_000_000, '{"a":{"dtype":"U8","x":' + nesting * 1_000_000):
        with pytest.raises(ingot.HeaderError):
            ingot.numpy.load(file_of(text.encode()))
