"""Uploads of files and models to a store of S3's protocol and to Azure's, against models of their rules."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot.errors import OptionError, StorageError
from support import stores
from support.commands import command_line, environment, good, in_a_terminal, run
from support.record import note
from support.shards import INDEX, NAMES, checkpoint
from support.stores import MIB, STORES, Fault, Store, Stored

pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")

#: Uploads of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_UPLOADS", "10"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

URL, PATH = "s3://models/a b/x.bin", "/models/a b/x.bin"
FOLDER, AT = "s3://models/run/", "/models/run/"
FILES = checkpoint()
OLD = Stored(b"old", {})
#: In parts: the last one is short.
LARGE = np.random.default_rng(0).bytes(17 * MIB)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with stores.running() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    return path


def stored(store: Store) -> dict[str, bytes]:
    return {path: found.data for path, found in store.objects.items()}


# Files. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"any", LARGE], ids=["empty", "small", "large"])
@pytest.mark.parametrize("rules", ["s3", "r2", "without checksums"])
def test_upload_writes_the_bytes_of_the_file(rules: str, data: bytes, tmp_path: Path, store: Store) -> None:
    store.rules = STORES[rules]
    done = ingot.upload(file(tmp_path, data), URL)
    assert stored(store) == {PATH: data}
    assert store.uploads == {}
    assert (done.url, done.nbytes, done.files) == (URL, len(data), ())


@pytest.mark.parametrize("data", [b"any", LARGE], ids=["small", "large"])
def test_upload_writes_to_azure(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures")
    with stores.running(kind=stores.Azure) as store:
        ingot.upload(file(tmp_path, data), "az://models/a/", storage_options=store.options)
        assert stored(store) == {"/models/a/x.bin": data}
        with pytest.raises(FileExistsError):
            ingot.upload(file(tmp_path, b"new"), "az://models/a/", storage_options=store.options)
        ingot.upload(file(tmp_path, b"new"), "az://models/a/", overwrite=True, storage_options=store.options)
        assert stored(store) == {"/models/a/x.bin": b"new"}


def test_upload_to_a_folder_keeps_the_name(store: Store, tmp_path: Path) -> None:
    assert ingot.upload(file(tmp_path, b"any"), FOLDER).url == f"{FOLDER}x.bin"
    assert stored(store) == {f"{AT}x.bin": b"any"}


def test_upload_reports_all_bytes(store: Store, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    ingot.upload(file(tmp_path, LARGE), URL, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(LARGE), len(LARGE))


def test_existing_object_is_an_error_before_a_byte_is_sent(store: Store, tmp_path: Path) -> None:
    store.objects[PATH] = OLD
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        ingot.upload(file(tmp_path, LARGE), URL)
    assert caught.value.filename == URL
    assert store.asked == ["head"]
    ingot.upload(file(tmp_path, LARGE), URL, overwrite=True)
    assert stored(store) == {PATH: LARGE}


def test_object_of_another_writer_stays(store: Store, tmp_path: Path) -> None:
    # The probe of the store completes parts too.
    store.faults = [Fault("complete", 2, "replaced before")]
    with pytest.raises(FileExistsError):
        ingot.upload(file(tmp_path, LARGE), URL)
    assert stored(store) == {PATH: b"of another writer"}
    assert store.uploads == {}


@pytest.mark.parametrize("kind", ["part", "put"])
def test_file_that_changes_during_the_upload_makes_no_object(store: Store, tmp_path: Path, kind: str) -> None:
    path = file(tmp_path, LARGE if kind == "part" else b"any")
    original = path.stat().st_mtime_ns

    def change(asked: str) -> None:
        # The last request before the first part, or before the object.
        if asked == ("begin" if kind == "part" else "delete") and path.stat().st_mtime_ns == original:
            with path.open("r+b") as changed:
                changed.write(b"ANY")
            os.utime(path, ns=(original + 10**9, original + 10**9))

    store.watch = change
    with pytest.raises(StorageError) as caught:
        ingot.upload(path, URL)
    assert caught.value.code == "changed"
    assert caught.value.path == str(path)
    assert (store.objects, store.uploads) == ({}, {})


# Models. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["", INDEX], ids=["directory", "index"])
@pytest.mark.parametrize("url", [FOLDER, FOLDER.rstrip("/")])
def test_upload_of_a_model_sends_the_index_last(store: Store, model: Path, source: str, url: str) -> None:
    (model / "config.json").write_text("{}")
    done = ingot.upload(model / source, url)
    assert stored(store) == {AT + name: data for name, data in FILES.items()}
    assert store.server.requests[-1].path == AT + INDEX
    assert (done.url, done.nbytes) == (FOLDER + INDEX, sum(map(len, FILES.values())))
    assert [one.url for one in done.files] == [FOLDER + name for name in (*NAMES, INDEX)]
    assert len(ingot.open(FOLDER)) == 2 * len(NAMES)


def test_upload_of_a_directory_with_one_file_sends_it(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    ingot.numpy.save_file({"a": np.ones(3)}, folder / "weights.bt")
    done = ingot.upload(folder, FOLDER)
    assert stored(store) == {f"{AT}weights.bt": (folder / "weights.bt").read_bytes()}
    assert (done.url, done.files) == (f"{FOLDER}weights.bt", ())


def test_existing_index_is_an_error_before_a_shard_is_sent(store: Store, model: Path) -> None:
    store.objects[AT + INDEX] = OLD
    with pytest.raises(FileExistsError):
        ingot.upload(model, FOLDER)
    assert store.asked == ["head"]


def test_existing_shard_is_kept_and_leaves_no_index(store: Store, model: Path) -> None:
    store.objects[AT + NAMES[1]] = OLD
    with pytest.raises(FileExistsError) as caught:
        ingot.upload(model, FOLDER)
    assert caught.value.filename == FOLDER + NAMES[1]
    assert "overwrite=True replaces them" in "".join(caught.value.__notes__)
    assert stored(store) == {AT + NAMES[0]: FILES[NAMES[0]], AT + NAMES[1]: b"old"}
    ingot.upload(model, FOLDER, overwrite=True)
    assert stored(store) == {AT + name: data for name, data in FILES.items()}


def test_overwrite_removes_the_index_before_a_shard_is_replaced(store: Store, model: Path) -> None:
    for name in FILES:
        store.objects[AT + name] = OLD
    store.faults = [Fault("put", 1, "refused"), Fault("begin", 1, "refused")]
    with pytest.raises(PermissionError):
        ingot.upload(model, FOLDER, overwrite=True)
    assert AT + INDEX not in store.objects
    assert store.asked[0] == "delete"


def test_model_that_is_replaced_during_the_upload_gets_no_index(store: Store, model: Path) -> None:
    def replace(kind: str) -> None:
        if (AT + NAMES[0]) in store.objects and not (model / "new").exists():
            (model / "new").touch()
            (model / "copy").write_bytes(FILES[NAMES[0]])
            (model / "copy").replace(model / NAMES[0])

    store.watch = replace
    with pytest.raises(StorageError) as caught:
        ingot.upload(model, FOLDER)
    assert (caught.value.code, caught.value.path) == ("changed", str(model / NAMES[0]))
    assert AT + INDEX not in store.objects


def test_any_fault_leaves_a_whole_model_or_no_index(model: Path) -> None:
    print(f"INGOT_SEED={SEED}")
    rng = random.Random(SEED)
    kinds = ("put", "begin", "part", "complete", "head", "delete")
    hows = [how for how in stores.FAULTS if "in 200" not in how and not how.startswith("replaced")]
    for number in range(ROUNDS):
        with stores.running() as store:
            exists, overwrite, raised = rng.random() < 0.5, rng.random() < 0.6, None
            if exists:
                store.objects = {AT + name: OLD for name in FILES}
            store.faults = [
                Fault(rng.choice(kinds), rng.randint(0, 8), rng.choice(hows), rng.choice((1, 1, 2, 9)))
                for _ in range(rng.randint(1, 3))
            ]
            options = {**store.options, "retries": rng.choice((0, 2))}
            try:
                ingot.upload(model, FOLDER, overwrite=overwrite, storage_options=options)
            except OSError as fault:
                raised = fault
            told = (SEED, number, store.faults, overwrite, exists, store.asked, raised)
            found = {name: store.data(AT + name) for name in FILES}
            if raised is None:
                assert found == FILES, told
                assert overwrite or not exists, told
            elif found[INDEX] is not None:
                assert found == FILES or set(found.values()) == {b"old"}, told
    note("uploads of a model with faults", ROUNDS, 0, seed=SEED)


# Arguments. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://host/a", "hf://me/repo/a", "gs://bucket/a", "a/b", "file:///a"])
def test_destinations_that_are_not_written_are_rejected(store: Store, tmp_path: Path, url: str) -> None:
    with pytest.raises(OptionError) as caught:
        ingot.upload(file(tmp_path, b"any"), url)
    assert caught.value.code == "bad-url"
    ended = run("upload", file(tmp_path, b"any"), url, "--dry-run")
    assert ended.code == 2
    assert "expected a URL of s3:// or az://" in ended.err


def test_sources_that_cannot_be_read_send_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ingot.upload(tmp_path / "missing", URL)
    with pytest.raises(IsADirectoryError, match="holds no checkpoint"):
        ingot.upload(tmp_path, URL)
    with pytest.raises(OptionError, match="expected a path on this machine"):
        ingot.upload(URL, URL)
    assert store.asked == []


# The command. ----------------------------------------------------------------------------------------------


def test_upload_command_uploads_a_file(store: Store, tmp_path: Path) -> None:
    path = file(tmp_path, b"any")
    assert good("upload", path, URL, "--json").json() == {"url": URL, "nbytes": 3, "files": []}
    assert stored(store) == {PATH: b"any"}
    ended = run("upload", path, URL)
    assert ended.code == 2
    assert f"{URL}: the object exists — --overwrite replaces it" in ended.err
    assert good("upload", path, FOLDER, "-q").out == f"{FOLDER}x.bin\n"


def test_upload_command_uploads_a_sharded_model(store: Store, model: Path) -> None:
    words = ["upload", model, FOLDER]
    dry = good(*words, "--dry-run").rows()
    assert store.asked == []
    assert dry == [[FOLDER + name, str(len(FILES[name]))] for name in (*NAMES, INDEX)]
    assert good(*words).rows() == dry
    out = in_a_terminal(*words, "--overwrite", columns=200, **store.environment).out
    assert out.splitlines()[-1] == "uploaded 4 files: 1.57 MB"


def test_upload_command_leaves_no_parts_after_ctrl_c(store: Store, tmp_path: Path) -> None:
    import signal

    waiting, go_on = threading.Event(), threading.Event()

    def wait(kind: str) -> None:
        if kind == "part":
            waiting.set()
            go_on.wait(60)

    store.watch = wait
    words = command_line("upload", file(tmp_path, LARGE), URL)
    with subprocess.Popen(
        words, env=environment() | store.environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert waiting.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "error: interrupted\n"
        assert process.returncode == 130
    go_on.set()
    assert (store.objects, store.uploads) == ({}, {})
