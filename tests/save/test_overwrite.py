"""Nothing is replaced without `overwrite=True`, nor what is read-only without a word of its own."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.processes import run

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

OLD = b"somebody's only copy"
STATE = {"a": torch.zeros(600), "b": torch.ones(600)}
Write = Callable[..., Any]


def merge(folder: Path, **options: Any) -> Path:
    ingot.merge([folder / "source.safetensors"], folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def rewrite(folder: Path, **options: Any) -> Path:
    ingot.rewrite(folder / "source.safetensors", folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def convert(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out.safetensors", **options)
    return folder / "out.safetensors"


def convert_to_npz(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out.npz", **options)
    return folder / "out.npz"


def convert_to_shards(folder: Path, **options: Any) -> Path:
    ingot.convert(folder / "source.safetensors", folder / "out", max_shard_size=2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


def split(folder: Path, **options: Any) -> Path:
    ingot.split(folder / "source.safetensors", folder / "out", 2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


def save_sharded(folder: Path, **options: Any) -> Path:
    ingot.torch.save_sharded(STATE, folder / "out", 2500, **options)
    return folder / "out" / "model-00001-of-00002.safetensors"


WRITERS: list[Write] = [merge, rewrite, convert, convert_to_npz, convert_to_shards, split, save_sharded]
every_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ingot.torch.save_file(STATE, tmp_path / "source.safetensors")
    return tmp_path


def place(write: Write, folder: Path) -> Path:
    """Where the writer has its file, or its first shard, with something in it."""
    there = write(folder)
    whole = sorted(there.parent.glob("model*"))
    assert there.exists()
    for shard in whole:
        shard.unlink()
    there.write_bytes(OLD)
    return there


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@every_writer
def test_what_is_there_stays_and_is_named(write: Write, folder: Path) -> None:
    there = place(write, folder)
    before = tree(folder)
    with pytest.raises(FileExistsError, match=r"overwrite=True replaces it") as caught:
        write(folder)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(there))
    assert tree(folder) == before


@every_writer
def test_it_is_replaced_where_that_is_asked_for(write: Write, folder: Path) -> None:
    there = place(write, folder)
    write(folder, overwrite=True)
    assert there.read_bytes() != OLD
    assert not list(folder.rglob(".*"))


# By one process for all of them: one that imports torch takes seconds to begin.
READ_ONLY = """
import encodings.cp437, ingot.torch
from importlib import import_module
sys.path[:0] = {paths!r}
test = import_module("test_overwrite")
# Once elsewhere: what is imported late may lie where nobody may look.
for write in test.WRITERS:
    os.makedirs(f"elsewhere/{{write.__name__}}")
    os.link("source.safetensors", f"elsewhere/{{write.__name__}}/source.safetensors")
    write(test.Path("elsewhere", write.__name__))
become_nobody()
found = {{write.__name__: [] for write in test.WRITERS}}
for write in test.WRITERS:
    rare = {{"replace_read_only": True}}
    for options in ({{}}, {{"overwrite": True}}, {{"overwrite": True, "write_options": rare}}):
        try:
            write(test.Path(write.__name__), **options)
            outcome = "written"
        except OSError as error:
            outcome = [type(error).__name__, error.errno, "replace_read_only" in str(error)]
        found[write.__name__].append(outcome)
say(found)
"""


@pytest.fixture
def folder_of_anybody() -> Iterator[Path]:
    """One that others get to too: each pytest that starts closes those above its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        ingot.torch.save_file(STATE, folder / "source.safetensors")
        yield folder


def test_what_is_read_only_has_a_word_of_its_own(folder_of_anybody: Path) -> None:
    folder, places = folder_of_anybody, {}
    for write in WRITERS:
        own = folder / write.__name__
        own.mkdir()
        os.link(folder / "source.safetensors", own / "source.safetensors")
        there = places[write.__name__] = place(write, own)
        there.chmod(0o444)
        own.chmod(0o777)
        there.parent.chmod(0o777)
    tests = Path(__file__).parents[1]
    found = run(READ_ONLY.format(paths=[str(tests), str(tests / "save")]), folder=folder).said()
    assert found.keys() == places.keys()
    for name, (refused, read_only, written) in found.items():
        assert refused == ["FileExistsError", errno.EEXIST, False], name
        assert read_only == ["PermissionError", errno.EACCES, True], name
        assert written == "written", name
        assert places[name].read_bytes() != OLD, name


# Those that tell of progress, by which a test knows when they are nearly done. `save_sharded` takes the steps
# of `split`.
MEANWHILE = [(write, True) for write in WRITERS if write is not save_sharded]
# Those whose links Python makes, where the file system has none.
MEANWHILE += [(convert_to_shards, False), (split, False)]


@pytest.mark.parametrize(
    ("write", "links"), MEANWHILE, ids=[f"{write.__name__}-{links}" for write, links in MEANWHILE]
)
def test_what_was_made_meanwhile_stays(
    write: Write, links: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place(write, folder)
    there.unlink()

    def made(done: int, total: int) -> None:
        if done == total and not there.exists():
            there.write_bytes(OLD)

    def unlinked(*given: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", unlinked)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write(folder, progress=made)
    assert there.read_bytes() == OLD
    assert not list(folder.rglob(".*"))
    assert not list(folder.rglob("*.index.json"))


def test_a_stream_is_nothing_that_could_be_lost(folder: Path) -> None:
    reading, writing = os.pipe()
    try:
        ingot.rewrite(folder / "source.safetensors", f"/dev/fd/{writing}", format="safetensors")
        assert ingot.numpy.load(os.read(reading, 1 << 16))["b"].tolist() == [1.0] * 600
    finally:
        os.close(reading)
        os.close(writing)


def test_upstreams_functions_and_the_writer_replace(folder: Path) -> None:
    path = folder / "source.safetensors"
    ingot.numpy.save_file({"c": numpy.ones(3)}, path)
    assert list(ingot.numpy.load_file(path)) == ["c"]
    with ingot.Writer(path, {"d": ("F32", [1])}, overwrite=True) as writer:
        writer.write("d", numpy.ones(1, "f4"))
        writer.commit()
    assert list(ingot.numpy.load_file(path)) == ["d"]
