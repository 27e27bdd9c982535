"""`ingot meta` and `ingot modelspec` with several paths, patterns and thumbnails."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import numpy
import pytest

import ingot
from ingot._base import images
from ingot.numpy import save_file
from support.commands import command_line, environment, good, run

METADATA = {
    "format": "pt",
    "ss_tag_frequency": "{}",
    "ss_dataset_dirs": "{}",
    "ss_network_alpha": "8",
    "ss_base_model_version": "sdxl_base_v1-0",
    "modelspec.title": "Ducks",
    "modelspec.license": "MIT",
    "modelspec.thumbnail": "data:image/jpeg;base64,/9j/",
}
# Pictures of 2 x 3 pixels, as Pillow writes them.
IMAGES = {
    "png": "iVBORw0KGgoAAAANSUhEUgAAAAIAAAADCAIAAAA2iEnWAAAAFElEQVR4nGM8wcXFwMDAxMDAgKAAEWYA4jBK+akAAA"
    "AASUVORK5CYII=",
    "gif": "R0lGODdhAgADAIEAAMgKCgAAAAAAAAAAACwAAAAAAgADAAAIBgABCBwYEAA7",
    "webp": "UklGRh4AAABXRUJQVlA4TBEAAAAvAYAAAAdQhSJXof+BiOh/AAA=",
    "jpeg": "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarY"
    "qMyP/L2u71////m8H////6/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4"
    "+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj/wAARCAADAAIDASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAT/xA"
    "AUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFQEBAQAAAAAAAAAAAAAAAAAAAwX/xAAUEQEAAAAAAAAAAAAAAAAAAAAA/9oA"
    "DAMBAAIRAxEAPwCMAKk//9k=",
}
PNG = base64.b64decode(IMAGES["png"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "loras"
    made.mkdir()
    for name in ("a", "b"):
        save_file({"w": numpy.zeros(4)}, made / f"{name}.safetensors", METADATA | {"name": name})
    return made


def metadata(path: Path) -> dict[str, str]:
    return ingot.inspect(path).metadata or {}


def test_meta_get_of_several_models_is_a_table(folder: Path) -> None:
    rows = good("meta", "get", folder, "name", "modelspec.*").rows()
    assert len(rows) == 8
    assert [Path(row[0]).name for row in rows if row[1] == "name"] == ["a.safetensors", "b.safetensors"]
    models = good("meta", "get", *sorted(folder.iterdir()), "--json").json()["models"]
    assert models[1]["metadata"]["name"] == "b"
    assert good("meta", "get", folder / "a.safetensors", "name").out == "a\n"
    assert run("meta", "get", folder, "absent").code == 2


def test_meta_set_and_rm_of_several_models(folder: Path) -> None:
    first, second = sorted(folder.iterdir())
    good("meta", "set", folder, "author=me", "parent=base.safetensors")
    assert metadata(first)["author"] == metadata(second)["author"] == "me"
    assert metadata(first)["parent"] == "base.safetensors"
    good("meta", "set", first, "only=here")
    out = good("meta", "rm", first, second, "ss_*", "only", "--json").json()
    assert [one["removed"][-1] for one in out["models"]] == ["only", "ss_tag_frequency"]
    assert not any(key.startswith("ss_") for key in metadata(second))
    assert run("meta", "rm", folder, "ss_*").err.startswith("error: 2 models: metadata has no key `ss_*`")


def test_meta_rm_takes_a_key_with_a_star_literally(tmp_path: Path) -> None:
    save_file({"w": numpy.zeros(1)}, tmp_path / "a.safetensors", {"a*": "1", "ab": "2"})
    good("meta", "rm", tmp_path / "a.safetensors", "a*")
    assert metadata(tmp_path / "a.safetensors") == {"ab": "2"}


@pytest.mark.parametrize(
    ("command", "word", "expected"),
    [
        (("meta", "rm"), "ss_*", "a KEY"),
        (("meta", "set"), "author=me", "KEY=VALUE"),
        (("modelspec", "set"), "title=Ducks", "KEY=VALUE, --hash or --thumbnail"),
    ],
)
def test_words_before_the_paths_are_named(
    folder: Path, command: tuple[str, str], word: str, expected: str
) -> None:
    failed = run(*command, word, folder)
    assert failed.code == 2
    assert f"error: expected {expected} after the paths, found `{word}` before them" in failed.err
    alone = run(*command, folder)
    assert f"error: expected {expected} (see" in alone.err


def test_meta_clean_training_keeps_title_licence_thumbnail_and_network(folder: Path) -> None:
    before = ingot.hash(folder / "a.safetensors", "autov3")
    good("meta", "clean", "--training", folder)
    gone = {"ss_tag_frequency", "ss_dataset_dirs"}
    expected = {key: text for key, text in METADATA.items() if key not in gone} | {"name": "a"}
    assert metadata(folder / "a.safetensors") == expected
    assert ingot.hash(folder / "a.safetensors", "autov3") == before
    good("meta", "clean", folder)
    assert metadata(folder / "b.safetensors") == {"format": "pt"}


def test_meta_clean_dry_run_and_options(folder: Path) -> None:
    out = good("meta", "clean", folder, "--training", "--dry-run").out
    assert out.count(": nothing was written: 0 keys to set, 2 to remove\n") == 2
    assert metadata(folder / "a.safetensors")["ss_tag_frequency"] == "{}"
    assert run("meta", "clean", folder, "-o", "x").code == 2
    assert run("meta", "clean", folder, "--training", "--all").code == 2
    assert run("meta", "clean", folder, "x").code == 2


def test_meta_continues_after_a_model_that_fails(folder: Path) -> None:
    (folder / "c.safetensors").mkdir()
    ended = run(
        "meta", "set", folder / "a.safetensors", folder / "gone.safetensors", folder / "b.safetensors", "k=v"
    )
    assert ended.code == 2
    assert "gone.safetensors" in ended.err
    assert metadata(folder / "a.safetensors")["k"] == metadata(folder / "b.safetensors")["k"] == "v"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["meta", "set"], ["author=me"]),
        (["meta", "set", "--files"], ["author=me"]),
        (["meta", "rm"], ["ss_*"]),
        (["meta", "rm", "--files"], ["ss_*"]),
        (["meta", "clean"], []),
        (["modelspec", "set"], ["author=me", "--hash"]),
    ],
    ids=lambda words: " ".join(words) or None,
)
def test_change_of_many_reports_an_unreadable_model_and_continues(
    folder: Path, before: list[str], after: list[str]
) -> None:
    save_file({"w": numpy.zeros(4)}, folder / "c.safetensors", METADATA)
    first, broken, *others = sorted(folder.iterdir())
    broken.write_bytes(b"\xff" * 20)
    headers = {path: metadata(path) for path in (first, *others)}
    found = run(*before, first, broken, *others, *after, "--json")
    assert found.code == 1
    assert [one["path"] for one in found.json()["models"] if "error" in one] == [str(broken)]
    assert broken.read_bytes() == b"\xff" * 20
    assert all(metadata(path) != pairs for path, pairs in headers.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["meta", "set"], ["author=me"]),
        (["meta", "set", "--files"], ["author=me"]),
        (["meta", "clean"], []),
        (["modelspec", "set"], ["author=me"]),
    ],
    ids=lambda words: " ".join(words) or None,
)
def test_change_of_many_is_complete_after_a_closed_pipe(
    folder: Path, before: list[str], after: list[str]
) -> None:
    headers = {path: metadata(path) for path in folder.iterdir()}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command_line(*before, folder, *after),
        stdout=write,
        stderr=subprocess.PIPE,
        # So that the first line already fails.
        env=environment(PYTHONUNBUFFERED="1"),
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
    assert all(metadata(path) != pairs for path, pairs in headers.items())


def test_change_of_many_is_refused_before_any_change(folder: Path, tmp_path: Path) -> None:
    save_file({"a": numpy.zeros(1000), "b": numpy.zeros(1000)}, tmp_path / "whole.safetensors")
    ingot.split(tmp_path / "whole.safetensors", folder, "8KB", filename_pattern="z{suffix}.safetensors")
    ended = run("meta", "set", folder, "total_size=big")
    assert (ended.code, ended.out) == (2, "")
    assert "`total_size` is not text, but must be" in ended.err
    assert "total_size" not in metadata(folder / "a.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFO")
def test_modelspec_thumbnail_does_not_wait_for_a_pipe(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    found = run("modelspec", "set", folder, "--thumbnail", tmp_path / "pipe.png")
    assert found.code == 2
    assert "is not a regular file" in found.err


def test_modelspec_of_several_models(folder: Path) -> None:
    assert len(good("modelspec", "show", folder).rows()) == 6
    good("modelspec", "set", folder, "author=me", "--hash")
    hashes = [metadata(path)["modelspec.hash_sha256"] for path in folder.iterdir()]
    assert all(one.startswith("0x") for one in hashes)
    ended = run("modelspec", "validate", folder, "--json")
    assert ended.code == 1
    assert {Path(one["path"]).name for one in ended.json()["models"]} == {"a.safetensors", "b.safetensors"}


def test_modelspec_thumbnail_goes_in_and_out(folder: Path, tmp_path: Path) -> None:
    image, back = tmp_path / "duck.png", tmp_path / "back.png"
    image.write_bytes(PNG)
    good("modelspec", "set", folder, "--thumbnail", image)
    assert good("modelspec", "thumbnail", folder / "a.safetensors", "-o", back).out.endswith(
        "image/png, 77 B\n"
    )
    assert back.read_bytes() == PNG
    assert run("modelspec", "thumbnail", folder / "a.safetensors", "-o", back).code == 2
    good("modelspec", "thumbnail", folder / "a.safetensors", "-o", back, "--overwrite")


@pytest.mark.parametrize("kind", IMAGES)
def test_modelspec_thumbnail_rejects_an_image_that_is_not_whole(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    image, file = base64.b64decode(IMAGES[kind]), tmp_path / f"duck.{kind}"
    assert images.size_of(image) == (2, 3)
    for end in range(len(image)):
        with pytest.raises(ValueError, match=r"is truncated|is not a JPEG"):
            images.size_of(image[:end])
    file.write_bytes(image + b"<script>")
    ended = run("modelspec", "set", folder, "--thumbnail", file)
    assert (ended.code, ended.out) == (2, "")
    assert "continues for 8 bytes after the end of the image" in ended.err
    file.write_bytes(image)
    good("modelspec", "set", folder / "a.safetensors", "--thumbnail", file)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (b"GIF89a=1;<script>alert(1)</script>", "is damaged: a block has an unknown type"),
        (b"GIF89a\1\0\1\0\0\0\0;", "contains no picture"),
        (PNG.replace(b"x\x9c", b"x\x9d"), "is damaged: a checksum differs"),
        (
            base64.b64decode(IMAGES["jpeg"]).replace(b"\xff\xda", b"\xab\xda"),
            "is damaged: a marker is missing",
        ),
        (b"RIFF\x04\0\0\0WEBP", "contains no picture"),
    ],
)
def test_images_reports_what_is_wrong(image: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        images.size_of(image)


def test_modelspec_thumbnail_rejects_other_files(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.jpg"
    other.write_text("no image")
    ended = run("modelspec", "set", folder, "--thumbnail", other)
    assert (ended.code, ended.out) == (2, "")
    assert "is not a JPEG, PNG, WebP or GIF" in ended.err
    other.write_bytes(PNG + bytes(1_000_000))
    assert "is larger than 1.00 MB" in run("modelspec", "set", folder, "--thumbnail", other).err
    good("meta", "rm", folder, "modelspec.thumbnail")
    assert "has no thumbnail" in run("modelspec", "thumbnail", folder / "a.safetensors", "-o", "x").err


def test_modelspec_thumbnail_of_a_folder_writes_a_picture_for_each_model(
    folder: Path, tmp_path: Path
) -> None:
    pictures = tmp_path / "pictures"
    for name, kind in (("a", "jpeg"), ("b", "png")):
        image = tmp_path / f"picture.{kind}"
        image.write_bytes(base64.b64decode(IMAGES[kind]))
        good("modelspec", "set", folder / f"{name}.safetensors", "--thumbnail", image)
    assert len(good("modelspec", "thumbnail", folder, "-o", pictures).out.splitlines()) == 2
    assert (pictures / "a.jpg").read_bytes() == base64.b64decode(IMAGES["jpeg"])
    assert (pictures / "b.png").read_bytes() == PNG
    save_file({"w": numpy.zeros(4)}, folder / "c.safetensors")
    (folder / "d.safetensors").write_bytes(b"\xff" * 20)
    ended = run("modelspec", "thumbnail", folder, "-o", pictures, "--overwrite", "--json")
    assert ended.code == 1
    assert "warning" in ended.err
    assert ["error" in one for one in ended.json()["models"]] == [False, False, True, True]
    again = run("modelspec", "thumbnail", folder, "-o", pictures)
    assert (again.code, again.err.count("a.jpg"), again.err.count("b.png")) == (2, 1, 1)


def test_modelspec_thumbnail_of_models_with_one_name_writes_nothing(folder: Path, tmp_path: Path) -> None:
    ingot.rewrite(folder / "a.safetensors", folder / "a.bt")
    ended = run("modelspec", "thumbnail", folder, "-o", tmp_path / "pictures")
    assert ended.code == 2
    assert "would have the same name" in ended.err
    file = folder / "a.safetensors"
    assert (
        "expected a directory"
        in run("modelspec", "thumbnail", folder / "b.safetensors", file, "-o", file).err
    )
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(
    ("name", "better"), [("x.jpg", "x.png"), ("x.GIF", "x.png"), ("x.png", None), ("x", None)]
)
def test_modelspec_thumbnail_suggests_the_ending_of_its_type(
    folder: Path, tmp_path: Path, name: str, better: str | None
) -> None:
    (tmp_path / "duck").write_bytes(PNG)
    good("modelspec", "set", folder / "a.safetensors", "--thumbnail", tmp_path / "duck")
    ended = run("modelspec", "thumbnail", folder / "a.safetensors", "-o", tmp_path / name)
    assert (ended.code == 0) == (better is None) == (tmp_path / name).exists()
    if better:
        assert f"the thumbnail is of type image/png: did you mean `{tmp_path / better}`?" in ended.err


def test_modelspec_thumbnail_of_one_model_goes_into_a_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "duck").write_bytes(PNG)
    good("modelspec", "set", folder / "a.safetensors", "--thumbnail", tmp_path / "duck")
    good("modelspec", "thumbnail", folder / "a.safetensors", "-o", tmp_path)
    assert (tmp_path / "a.png").read_bytes() == PNG
