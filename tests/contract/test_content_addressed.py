"""No writer changes a blob of a content-addressed cache. The new file replaces the link of the snapshot."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot.cli.program import run as run_program
from ingot.errors import StorageError

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

OLD = {"w": torch.ones(8), "x": torch.zeros(4)}
NEW = {"w": torch.full((8,), 7.0)}

Change = Callable[[Path], Any]


def command(*arguments: Any) -> None:
    assert run_program([str(one) for one in arguments]) == 0


def source(path: Path) -> Path:
    """Return a file beside the cache that holds `NEW`."""
    found = next(folder for folder in path.parents if (folder / "cache").exists()) / "source.safetensors"
    ingot.torch.save_file(NEW, found)
    return found


def save_model(path: Path) -> None:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(NEW["w"])
    ingot.torch.save_model(model, path)


def use_writer(path: Path) -> None:
    with ingot.Writer(path, {"w": ("F32", (8,))}, overwrite=True) as writer:
        writer.write("w", NEW["w"])
        writer.commit()


def append_to_writer(path: Path) -> None:
    with ingot.Writer(path, write_options={"reserve_header": 400}, overwrite=True) as writer:
        writer.write("w", NEW["w"])
        writer.commit()


def serialize_file(path: Path) -> None:
    ingot.serialize_file({"w": {"dtype": "float32", "shape": [8], "data": NEW["w"].numpy().tobytes()}}, path)


def download(path: Path) -> None:
    found = source(path)

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(found.parent))

        def log_message(self, *given: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{found.name}"
        ingot.download(url, path, overwrite=True)
        server.shutdown()


WRITERS: dict[str, Change] = {
    "torch": lambda path: ingot.torch.save_file(NEW, path),
    "numpy": lambda path: ingot.numpy.save_file({"w": NEW["w"].numpy()}, path),
    "in_place": lambda path: ingot.torch.save_file(NEW, path, atomic=False),
    "background": lambda path: ingot.torch.save_file(NEW, path, background=True).result(),
    "checksums": lambda path: ingot.torch.save_file(NEW, path, checksums="xxh3"),
    "save_model": save_model,
    "save_state": lambda path: ingot.torch.save_state(NEW, path),
    "serialize_file": serialize_file,
    "Writer": use_writer,
    "Writer_without_specs": append_to_writer,
    "rewrite": lambda path: ingot.rewrite(source(path), path, overwrite=True),
    "rewrite_itself": lambda path: (
        ingot.rewrite(path, path, drop="x", overwrite=True),
        ingot.replace_tensor(path, "w", NEW["w"]),
    ),
    "merge": lambda path: ingot.merge([source(path)], path, overwrite=True),
    "convert": lambda path: ingot.convert(source(path), path, format="safetensors", overwrite=True),
    "convert_to_npz": lambda path: ingot.convert(source(path), path, format="npz", overwrite=True),
    "repair": lambda path: ingot.repair(source(path), path, overwrite=True),
    "download": download,
    "rename": lambda path: command("rename", source(path), path, "--overwrite", "-s", "w", "w"),
}
LINKS = ["relative", "absolute", "nested", "folder", "chain", "moved_blobs", "linked_blob", "sha1"]


class Cache:
    """A repository in a cache of the Hub, with one blob that two snapshots link to."""

    def __init__(self, folder: Path, link: str) -> None:
        self.repository = folder / "cache" / "models--me--gpt"
        blobs = self.repository / "blobs"
        self.repository.mkdir(parents=True)
        if link == "moved_blobs":
            (folder / "elsewhere").mkdir()
            blobs.symlink_to(folder / "elsewhere")
        else:
            blobs.mkdir()
        content = ingot.torch.save(OLD, {"title": "old"})
        if link == "sha1":
            self.blob = blobs / hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        else:
            self.blob = blobs / hashlib.sha256(content).hexdigest()
        if link == "linked_blob":
            (folder / "deduplicated").write_bytes(content)
            self.blob.symlink_to(folder / "deduplicated")
        else:
            self.blob.write_bytes(content)
        self.blob.chmod(0o640)
        self.before = self.blob.read_bytes()
        inner = "unet/model.safetensors" if link == "nested" else "model.safetensors"
        self.snapshots = [self.repository / "snapshots" / name / inner for name in ("c1", "c2")]
        for path in self.snapshots:
            path.parent.mkdir(parents=True)
            up = os.path.relpath(self.blob, path.parent)
            path.symlink_to(self.blob if link == "absolute" else up)
        self.path = self.snapshots[0]
        if link == "folder":
            (folder / "model").symlink_to(self.path.parent)
            self.path = folder / "model" / self.path.name
        if link == "chain":
            (folder / "mine.safetensors").symlink_to(self.path)
            self.path = folder / "mine.safetensors"

    def assert_intact(self) -> None:
        assert self.blob.read_bytes() == self.before
        assert self.snapshots[1].is_symlink()
        assert self.snapshots[1].read_bytes() == self.before
        assert sorted(path.name for path in self.blob.parent.iterdir()) == [self.blob.name]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path, "relative")
    yield made
    made.assert_intact()


# Every writer with a relative link, and one writer of each kind with every other kind of link.
CASES = [(writer, "relative") for writer in WRITERS]
CASES += [
    (writer, link) for writer in ("torch", "in_place", "Writer", "convert_to_npz") for link in LINKS[1:]
]


@pytest.mark.parametrize(("writer", "link"), CASES)
def test_writers_replace_the_link_of_a_snapshot(writer: str, link: str, tmp_path: Path) -> None:
    made = Cache(tmp_path, link)
    WRITERS[writer](made.path)
    made.assert_intact()
    assert not made.snapshots[0].is_symlink()
    assert made.path.is_symlink() == (link == "chain")
    assert made.snapshots[0].stat().st_mode & 0o777 == 0o640
    found = numpy.load(made.path) if writer == "convert_to_npz" else ingot.numpy.load_file(made.path)
    assert list(found) == ["w"]
    numpy.testing.assert_array_equal(found["w"], NEW["w"].numpy())
    assert [one.name for one in made.snapshots[0].parent.iterdir()] == [made.snapshots[0].name]


EDITS: dict[str, Change] = {
    "update_metadata": lambda path: ingot.update_metadata(path, {"title": "new"}),
    "update_metadata_twice": lambda path: [ingot.update_metadata(path, {"title": name}) for name in "ab"],
    "meta": lambda path: command("meta", "set", path, "title=new"),
    "modelspec": lambda path: command("modelspec", "set", path, "title=new"),
    "replace_tensor": lambda path: ingot.replace_tensor(path, "x", torch.ones(4)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_replace_the_link_of_a_snapshot(edit: Change, cache: Cache) -> None:
    edit(cache.path)
    assert not cache.path.is_symlink()
    assert cache.path.read_bytes() != cache.before
    with ingot.safe_open(cache.path, "numpy") as file:
        numpy.testing.assert_array_equal(file.get_tensor("w"), numpy.ones(8, "f4"))


def test_update_metadata_in_place_leaves_the_room_of_a_blob(tmp_path: Path) -> None:
    made = Cache(tmp_path, "relative")
    ingot.torch.save_file(
        OLD, tmp_path / "with_room", {"title": "old"}, write_options={"reserve_header": 512}
    )
    with_room = (tmp_path / "with_room").read_bytes()
    made.blob.unlink()
    made.blob = made.blob.with_name(hashlib.sha256(with_room).hexdigest())
    made.blob.write_bytes(with_room)
    made.before = with_room
    for path in made.snapshots:
        path.unlink()
        path.symlink_to(made.blob)
    assert ingot.update_metadata(made.path, {"title": "new"}) == "rewritten"
    made.assert_intact()
    assert ingot.update_metadata(made.path, {"title": "newer"}) == "in-place"
    made.assert_intact()


def test_update_metadata_leaves_other_hard_links_as_they_are(tmp_path: Path) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    ingot.torch.save_file(OLD, path, write_options={"reserve_header": 512})
    os.link(path, other)
    before = other.read_bytes()
    assert ingot.update_metadata(path, {"title": "new"}) == "rewritten"
    assert other.read_bytes() == before


@pytest.mark.parametrize("write", [*WRITERS.values(), *EDITS.values()], ids=[*WRITERS, *EDITS])
def test_writers_reject_a_path_to_a_blob(
    write: Change, cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((StorageError, AssertionError)) as raised:
        write(cache.blob)
    # A command prints the error.
    text = capsys.readouterr().err + str(raised.value)
    assert f"{cache.blob}: the file is a blob of a cache" in text
    assert getattr(raised.value, "code", "blob") == "blob"


def test_writers_replace_a_dangling_link_of_a_snapshot(tmp_path: Path) -> None:
    made = Cache(tmp_path, "relative")
    made.blob.unlink()
    ingot.torch.save_file(NEW, made.path)
    assert not made.blob.exists()
    assert not made.path.is_symlink()
    assert ingot.torch.load_file(made.path).keys() == NEW.keys()


@pytest.mark.parametrize("name", ["0" * 39, "0" * 65, "g" * 64, "model.safetensors"])
@pytest.mark.parametrize("beside", ["snapshots", "refs", "neither"])
def test_writers_follow_other_links(name: str, beside: str, tmp_path: Path) -> None:
    (tmp_path / beside).mkdir()
    (tmp_path / "blobs").mkdir()
    target, link = tmp_path / "blobs" / name, tmp_path / "link.safetensors"
    link.symlink_to(target)
    for tensors in (OLD, NEW):
        ingot.torch.save_file(tensors, link)
        assert link.is_symlink()
        assert ingot.torch.load_file(target).keys() == tensors.keys()


@pytest.mark.parametrize("where", ["blobs", "store"])
def test_writers_follow_a_digest_name_outside_a_store(where: str, tmp_path: Path) -> None:
    (tmp_path / where).mkdir()
    target, link = tmp_path / where / ("0" * 64), tmp_path / "link.safetensors"
    if where == "store":
        (tmp_path / "snapshots").mkdir()
    link.symlink_to(target)
    ingot.torch.save_file(NEW, link)
    assert link.is_symlink()
    assert target.exists()


@pytest.mark.parametrize("shape", ["flat", "snapshot"])
def test_save_sharded_and_split_into_a_snapshot_leave_its_blobs(shape: str, tmp_path: Path) -> None:
    made = Cache(tmp_path, "relative")
    snapshot = made.path.parent
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {"total_size": 48}, "weight_map": {"w": names[0], "x": names[1]}}
    contents = [ingot.torch.save({key: OLD[key]}) for key in ("w", "x")] + [json.dumps(index).encode()]
    blobs = {}
    for name, content in zip([*names, "model.safetensors.index.json"], contents, strict=True):
        blob = made.blob.with_name(hashlib.sha256(content).hexdigest())
        blob.write_bytes(content)
        blobs[blob] = content
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    made.path.unlink()
    if shape == "flat":
        ingot.torch.save_sharded({"w": torch.zeros(8), "x": torch.ones(4)}, snapshot, 40, overwrite=True)
        assert torch.equal(ingot.torch.load_file(snapshot)["w"], torch.zeros(8))
    else:
        command("meta", "set", snapshot, "title=new")
        command("meta", "set", snapshot, "title=new", "--files")
        assert (
            json.loads((snapshot / "model.safetensors.index.json").read_text())["metadata"]["title"] == "new"
        )
    for blob, content in blobs.items():
        assert blob.read_bytes() == content


@pytest.mark.parametrize("kind", ["export", "meta_export"])
def test_export_replaces_the_link_of_a_snapshot(kind: str, cache: Cache, tmp_path: Path) -> None:
    model = source(cache.path)
    if kind == "export":
        command("export", model, "w", "-o", cache.path, "--overwrite")
        numpy.testing.assert_array_equal(numpy.load(cache.path), NEW["w"].numpy())
    else:
        command("meta", "export", model, cache.path, "--overwrite")
        assert json.loads(cache.path.read_text()) == {}
    assert not cache.path.is_symlink()


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


@pytest.mark.parametrize("link", LINKS)
def test_check_and_verify_compare_a_blob_with_its_name(
    link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Cache(tmp_path, link)
    for path in (made.path, made.blob):
        assert run_program(["check", str(path)]) == 0
        if link != "sha1":
            assert ingot.verify(path).ok
            assert run_program(["verify", str(path)]) == 0
    flip_last_byte(made.blob)
    for path in (made.path, made.blob):
        capsys.readouterr()
        assert run_program(["check", str(path)]) == 1
        out = capsys.readouterr().out
        assert "blob" in out
        assert made.blob.name in out
        report = ingot.verify(path, raises=False)
        assert not report.ok
        if link != "sha1":
            assert report.file is not None
            assert report.file.expected == made.blob.name
            assert run_program(["verify", str(path)]) == 1


def test_check_and_verify_compare_the_shards_and_the_index_of_a_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Cache(tmp_path, "relative")
    snapshot = made.path.parent
    content = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(OLD, "model.safetensors")}).encode()
    index = made.blob.with_name(hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
    index.write_bytes(content)
    (snapshot / "model.safetensors.index.json").symlink_to(index)
    whole = snapshot / "model.safetensors.index.json"
    assert run_program(["check", str(whole)]) == 0
    assert ingot.verify(whole).ok
    index.write_bytes(content + b" ")
    assert run_program(["check", str(whole)]) == 1
    assert "model.safetensors.index.json" in capsys.readouterr().out
    index.write_bytes(content)
    flip_last_byte(made.blob)
    assert run_program(["check", str(whole)]) == 1
    assert not ingot.verify(whole, raises=False).ok
