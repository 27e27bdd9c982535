"""After a kill, a patch in place is finished only in the files in which it was begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.errors import raises

Version = dict[str, bytes]

# The first bytes of a file with a mark (FORMAT.md, "In place").
MARK = b"\xffpatch\r\n"


class Stop(Exception):
    """Ends a call in place of a kill."""


def stopping(path: Path) -> Callable[[int, int], None]:
    """Return a callable for `progress` that ends the call after `path` has its mark."""

    def stop(done: int, total: int) -> None:
        if path.read_bytes().startswith(MARK):
            raise Stop

    return stop


def contents(folder: Path) -> Version:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def unmarked(folder: Path) -> Version:
    return {name: data for name, data in contents(folder).items() if not data.startswith(MARK)}


def saved(folder: Path, value: int, checksums: Any) -> Path:
    """Write a checkpoint of three shards with tensors of one dtype and shape."""
    tensors = {name: numpy.zeros(3000, "u2") for name in "abc"}
    for array in tensors.values():
        array[:: 50 + 10 * value] += 1
    path = folder.with_suffix(".safetensors")
    ingot.numpy.save_file(tensors, path, checksums=checksums)
    ingot.split(path, folder, max_shard_size=6000)
    return folder


class Begun:
    """A patch that was begun in place and not finished: all shards have marks."""

    def __init__(self, folder: Path, checksums: Any) -> None:
        self.folder = saved(folder / "old", 0, checksums)
        self.patch = folder / "patch.safetensors"
        new = saved(folder / "new", 1, checksums)
        ingot.delta.diff(self.folder, new, self.patch)
        self.base, self.result = contents(self.folder), contents(new)
        self.other = contents(saved(folder / "other", 2, checksums))
        self.names = list(self.base)

        with pytest.raises(Stop):
            self.apply(progress=stopping(self.folder / self.names[-1]))
        self.marked = contents(self.folder)
        assert all(data.startswith(MARK) for data in self.marked.values())

    def apply(self, **options: Any) -> bool:
        return ingot.delta.apply(self.folder, self.patch, in_place=True, threads=1, **options)

    def put(self, number: int, version: Version) -> None:
        name = self.names[number]
        (self.folder / name).write_bytes(version[name])

    def refused(self, code: str, *names: str) -> ingot.SafetensorError:
        """Check that the patch is not finished, and that no file without a mark changes."""
        before = unmarked(self.folder)
        with raises((ingot.StorageError, ingot.IntegrityError), code=code) as raised:
            self.apply()
        assert unmarked(self.folder) == before
        for name in names:
            assert name in str(raised.value)
        assert isinstance(raised.value, ingot.SafetensorError)
        return raised.value


@pytest.fixture(params=[None, "xxh3"])
def begun(tmp_path: Path, request: pytest.FixtureRequest) -> Begun:
    return Begun(tmp_path, request.param)


States = Callable[[Begun], None]


def marked_in_part(begun: Begun) -> None:
    """A kill between the marks."""
    for number in (1, 2):
        begun.put(number, begun.base)


def finished_in_part(begun: Begun) -> None:
    """A kill between the headers."""
    assert begun.apply()
    for number in (1, 2):
        begun.put(number, begun.marked)


def restored_in_part(begun: Begun) -> None:
    """A shard was restored from a copy of the base."""
    begun.put(1, begun.base)


@pytest.mark.parametrize(
    "state", [marked_in_part, finished_in_part, restored_in_part], ids=lambda state: state.__name__
)
def test_in_place_finishes_files_of_the_base_and_of_the_result(begun: Begun, state: States) -> None:
    state(begun)
    assert begun.apply()
    assert contents(begun.folder) == begun.result
    assert not begun.apply()


def test_in_place_refuses_a_file_that_replaced_one_without_a_mark(begun: Begun) -> None:
    # The same size and the same tensors, as of another step.
    marked_in_part(begun)
    begun.put(2, begun.other)
    assert len(begun.other[begun.names[2]]) == len(begun.base[begun.names[2]])
    error = begun.refused("replaced-file", begun.names[2])
    assert isinstance(error, ingot.StorageError)
    assert str(error.expected).startswith("the version ")
    assert error.expected != error.found


def test_in_place_refuses_a_replaced_file_behind_finished_ones(begun: Begun) -> None:
    finished_in_part(begun)
    begun.put(1, begun.other)
    begun.refused("replaced-file", begun.names[1])


def test_in_place_refuses_a_file_of_other_tensors_of_the_same_size(begun: Begun) -> None:
    marked_in_part(begun)
    path = begun.folder / begun.names[1]
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"'))
    error = begun.refused("replaced-file", begun.names[1], "`b`", "`x`")
    assert "header" not in str(error)


def test_in_place_refuses_a_file_of_another_size(begun: Begun) -> None:
    path = begun.folder / begun.names[1]
    path.write_bytes(path.read_bytes() + b"\0")
    error = begun.refused("replaced-file", begun.names[1])
    assert error.found == f"{path.stat().st_size} bytes"


def test_in_place_refuses_marked_files_in_the_place_of_others(begun: Begun) -> None:
    first, _, third = begun.names
    (begun.folder / first).write_bytes(begun.marked[third])
    begun.refused("replaced-file", first, "expected file 0", "found file 2")


def test_in_place_refuses_an_index_that_was_replaced(begun: Begun) -> None:
    path = begun.folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes() + b"\n")
    begun.refused("replaced-file", path.name)


def test_in_place_keeps_the_marks_if_the_data_is_not_the_result(begun: Begun) -> None:
    path = begun.folder / begun.names[1]
    data = bytearray(path.read_bytes())
    # An element that the patch does not change.
    data[-3] ^= 1
    path.write_bytes(data)
    has_digests = b"ingot.checksums" in begun.base[begun.names[1]]
    kind, code = (
        (ingot.IntegrityError, "digest-mismatch") if has_digests else (ingot.StorageError, "replaced-file")
    )
    with raises(kind, code=code) as raised:
        begun.apply()
    assert begun.names[1] in str(raised.value)
    for name in begun.names:
        assert (begun.folder / name).read_bytes().startswith(MARK)
    begun.put(1, begun.base)
    assert begun.apply()
    assert contents(begun.folder) == begun.result


def test_in_place_finishes_a_single_file_and_compares_its_data(tmp_path: Path) -> None:
    base, new, patch = (tmp_path / f"{name}.safetensors" for name in ("base", "new", "patch"))
    array = numpy.arange(5000, dtype="u2")
    ingot.numpy.save_file({"a": array}, base, checksums=None)
    ingot.numpy.save_file({"a": array | array % 97 // 96}, new, checksums=None)
    ingot.delta.diff(base, new, patch)

    with pytest.raises(Stop):
        ingot.delta.apply(base, patch, in_place=True, progress=stopping(base))
    marked = base.read_bytes()
    # An element that the patch does not change.
    base.write_bytes(marked[:-6] + bytes(6))
    with raises(ingot.StorageError, code="replaced-file"):
        ingot.delta.apply(base, patch, in_place=True)
    base.write_bytes(marked)
    assert ingot.delta.apply(base, patch, in_place=True)
    assert base.read_bytes() == new.read_bytes()
