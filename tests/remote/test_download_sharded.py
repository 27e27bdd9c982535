"""Downloads of sharded models: files get their names when all are complete, the index last."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.progress import Progress, Stopped, stop
from support.servers import Answer, Handler, Request, Server, serving
from support.shards import INDEX, NAMES, checkpoint, files_in, folder, same

FILES = checkpoint()
TOTAL = sum(map(len, FILES.values()))
QUICK = {"retries": 0, "stall_timeout": 5}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(folder(FILES)) as server:
        yield server


def asked(server: Server) -> list[str]:
    return [unquote(request.path.partition("?")[0]).removeprefix("/model/") for request in server.requests]


def test_download_fetches_all_files_of_an_index(server: Server, tmp_path: Path) -> None:
    done = ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == FILES
    assert same(ingot.numpy.load_file(tmp_path))
    assert (done.path, done.nbytes, done.fetched, done.sha256) == (str(tmp_path / INDEX), TOTAL, TOTAL, None)
    assert [file.path for file in done.files] == [str(tmp_path / name) for name in [*NAMES, INDEX]]
    assert [file.nbytes for file in done.files] == [len(FILES[name]) for name in [*NAMES, INDEX]]
    assert pickle.loads(pickle.dumps(done)).files == done.files
    assert all(file.files == () for file in done.files)


def test_download_creates_a_directory_for_a_final_slash(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "new" / "gpt"
    ingot.download(server.url(f"/model/{INDEX}"), f"{place}/")
    assert files_in(place) == FILES
    ingot.download(server.url(f"/model/{NAMES[0]}"), f"{tmp_path}/one/")
    assert files_in(tmp_path / "one") == {NAMES[0]: FILES[NAMES[0]]}


@pytest.mark.parametrize("name", ["new", "file"])
def test_download_of_shards_needs_a_directory(server: Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ingot.OptionError, match="expected a directory"):
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path / name)
    assert files_in(tmp_path) == {"file": b"old"}
    assert server.requests == []


def test_download_of_shards_rejects_one_digest(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ingot.OptionError, match="for which one SHA-256 is not enough"):
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path, expected_sha256="ab" * 32)
    assert server.requests == []


def test_download_reports_progress_of_all_files(server: Server, tmp_path: Path) -> None:
    told = Progress()
    ingot.download(server.url(f"/model/{INDEX}"), tmp_path, progress=told)
    told.assert_complete(TOTAL)


def test_download_limits_its_parts_to_threads(tmp_path: Path) -> None:
    now, most = [0], [0]
    lock = threading.Lock()

    def answer(handler: Handler, request: Request) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        try:
            folder(FILES)(handler, request)
        finally:
            with lock:
                now[0] -= 1

    with serving(answer) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path, threads=1)
    assert most == [1]
    assert files_in(tmp_path) == FILES


def test_download_detects_an_index_by_name(tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "a.bin"}}',
        "a.bin": b"?",
    }
    with serving(folder(files)) as server:
        assert ingot.download(server.url("/model/config.json"), tmp_path).nbytes == 2
        ingot.download(server.url("/model/pytorch_model.bin.index.json"), tmp_path)
    assert files_in(tmp_path) == files


@pytest.mark.parametrize("claimed", [1 << 60, (1 << 63) + 5])
def test_download_of_an_impossible_size_leaves_nothing(tmp_path: Path, claimed: int) -> None:
    def answer(handler: Handler, request: Request) -> None:
        name = unquote(request.path).removeprefix("/model/")
        if name == INDEX:
            handler.part(FILES[INDEX], request)
            return
        begin, end = request.range
        handler.head(206, Content_Range=f"bytes {begin}-{end - 1}/{claimed}", Content_Length=end - begin)
        handler.body(bytes(end - begin))

    with serving(answer) as server, pytest.raises(ingot.StorageError) as caught:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert caught.value.path == str(tmp_path / NAMES[0])
    assert files_in(tmp_path) == {}


# Existing files


@pytest.mark.parametrize("name", [INDEX, *NAMES])
def test_download_replaces_files_with_overwrite_only(server: Server, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert caught.value.filename == str(path)
    assert files_in(tmp_path) == {name: b"old"}
    assert set(asked(server)) <= {INDEX}
    ingot.download(server.url(f"/model/{INDEX}"), tmp_path, overwrite=True)
    assert files_in(tmp_path) == FILES


def test_download_names_a_missing_shard_and_keeps_the_old_model(tmp_path: Path) -> None:
    old = checkpoint(1)
    with serving(folder(old)) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    with serving(folder({name: data for name, data in FILES.items() if name != NAMES[1]})) as server:
        with pytest.raises(FileNotFoundError) as caught:
            ingot.download(server.url(f"/model/{INDEX}"), tmp_path, overwrite=True)
        assert caught.value.filename == server.url(f"/model/{NAMES[1]}")
    assert files_in(tmp_path) == old


# Resuming


def breaking(bad: str, files: dict[str, bytes] = FILES) -> Answer:
    """Return a server that sends only the header of the shard `bad`."""
    whole = folder(files)

    def answer(handler: Handler, request: Request) -> None:
        is_bad = unquote(request.path) == f"/model/{bad}" and request.range[1] > 64 << 10
        if is_bad:
            handler.raw(b"")
        else:
            whole(handler, request)

    return answer


def part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.ingot-part")


def broken_off(place: Path, bad: str = NAMES[2]) -> Server:
    with serving(breaking(bad)) as server, pytest.raises(ingot.StorageError):
        ingot.download(server.url(f"/model/{INDEX}"), place, storage_options=QUICK, threads=1)
    assert not any((place / name).exists() for name in FILES)
    return server


def test_download_of_shards_resumes(tmp_path: Path) -> None:
    server = broken_off(tmp_path)
    assert part_of(tmp_path / NAMES[0]).exists()
    assert not part_of(tmp_path / INDEX).exists()
    with serving(folder(FILES), port=server.port) as again:
        done = ingot.download(again.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == FILES
    assert done.fetched == len(FILES[INDEX]) + len(FILES[NAMES[2]])
    assert [file.fetched for file in done.files] == [0, 0, len(FILES[NAMES[2]]), len(FILES[INDEX])]


def test_download_of_another_version_restarts(tmp_path: Path) -> None:
    server = broken_off(tmp_path)
    new = checkpoint(1)

    def answer(handler: Handler, request: Request) -> None:
        handler.part(new[unquote(request.path).removeprefix("/model/")], request, ETag='"new"')

    with serving(answer, port=server.port) as again:
        done = ingot.download(again.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == new
    assert done.fetched == done.nbytes


def test_download_resumes_after_ctrl_c(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done > len(FILES[NAMES[0]]) + len(FILES[INDEX]):
            signal.raise_signal(signal.SIGINT)

    with serving(folder(FILES)) as server:
        with pytest.raises(KeyboardInterrupt):
            ingot.download(server.url(f"/model/{INDEX}"), tmp_path, progress=progress, threads=1)
        assert not any((tmp_path / name).exists() for name in FILES)
        done = ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == FILES
    assert done.fetched < TOTAL


def test_download_keeps_the_old_model_after_ctrl_c(tmp_path: Path) -> None:
    old = checkpoint(1)
    with serving(folder(old)) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)

    def progress(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with serving(folder(FILES)) as server, pytest.raises(KeyboardInterrupt):
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path, overwrite=True, progress=progress)
    assert {name: data for name, data in files_in(tmp_path).items() if "ingot-part" not in name} == old


def test_download_rejects_a_second_download(tmp_path: Path) -> None:
    seen = []

    def progress(done: int, total: int) -> None:
        if not seen:
            with pytest.raises(ingot.StorageError) as caught:
                ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
            seen.append(caught.value.code)

    with serving(folder(FILES)) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path, progress=progress)
    assert seen == ["busy"]
    assert files_in(tmp_path) == FILES


# Failure between the renames


def half_named(place: Path, server: Server) -> None:
    """Fail after the first shard got its name: the name of the second one is taken."""

    def progress(done: int, total: int) -> None:
        if done == total:
            (place / NAMES[1]).write_bytes(b"in the way")

    with pytest.raises(FileExistsError) as caught:
        ingot.download(server.url(f"/model/{INDEX}"), place, progress=progress)
    assert caught.value.filename == str(place / NAMES[1])
    assert (place / NAMES[0]).read_bytes() == FILES[NAMES[0]]
    assert not (place / INDEX).exists()
    (place / NAMES[1]).unlink()


def test_download_keeps_renamed_shards(server: Server, tmp_path: Path) -> None:
    half_named(tmp_path, server)
    told = Progress()
    done = ingot.download(server.url(f"/model/{INDEX}"), tmp_path, progress=told)
    assert files_in(tmp_path) == FILES
    assert (done.files[0].fetched, done.files[2].fetched) == (0, 0)
    told.assert_complete(TOTAL)


def test_download_keeps_renamed_shards_after_any_number_of_breaks(server: Server, tmp_path: Path) -> None:
    half_named(tmp_path, server)

    with pytest.raises(Stopped):
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path, progress=stop)
    half_named(tmp_path, server)
    assert ingot.download(server.url(f"/model/{INDEX}"), tmp_path).files[0].fetched == 0
    assert files_in(tmp_path) == FILES


@pytest.mark.parametrize("damage", ["changed", "shorter", "longer"])
def test_download_rejects_a_changed_shard(server: Server, tmp_path: Path, damage: str) -> None:
    half_named(tmp_path, server)
    data = FILES[NAMES[0]]
    written = {"changed": data[:-1] + bytes([data[-1] ^ 1]), "shorter": data[:-1], "longer": data + b"?"}[
        damage
    ]
    (tmp_path / NAMES[0]).write_bytes(written)
    with pytest.raises(FileExistsError) as caught:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert caught.value.filename == str(tmp_path / NAMES[0])
    assert (tmp_path / NAMES[0]).read_bytes() == written
    assert not (tmp_path / INDEX).exists()
    ingot.download(server.url(f"/model/{INDEX}"), tmp_path, overwrite=True)
    assert files_in(tmp_path) == FILES


def test_download_rejects_a_shard_of_another_version(server: Server, tmp_path: Path) -> None:
    half_named(tmp_path, server)

    def answer(handler: Handler, request: Request) -> None:
        name = unquote(request.path).removeprefix("/model/")
        handler.part(FILES[name], request, ETag=f'"{name == NAMES[0]}"')

    server.replace(answer)
    with pytest.raises(FileExistsError) as caught:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert caught.value.filename == str(tmp_path / NAMES[0])


def test_download_removes_the_index_before_replacing_shards(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with serving(folder(checkpoint(1))) as server:
        ingot.download(server.url(f"/model/{INDEX}"), place.as_posix() + "/")

    def progress(done: int, total: int) -> None:
        # A directory with the name of the second shard cannot be replaced. The last progress may be repeated.
        if done == total and (place / NAMES[1]).is_file():
            (place / NAMES[1]).unlink()
            (place / NAMES[1]).mkdir()

    with serving(folder(FILES)) as server:
        with pytest.raises(OSError, match=NAMES[1]):
            ingot.download(server.url(f"/model/{INDEX}"), place, overwrite=True, progress=progress)
        assert (place / NAMES[0]).read_bytes() == FILES[NAMES[0]]
        assert not (place / INDEX).exists()
        (place / NAMES[1]).rmdir()
        ingot.download(server.url(f"/model/{INDEX}"), place, overwrite=True)
    assert files_in(place) == FILES


# Servers without ranges


def test_download_without_ranges_reads_from_the_start(tmp_path: Path) -> None:
    def answer(handler: Handler, request: Request) -> None:
        data = FILES[unquote(request.path).removeprefix("/model/")]
        handler.head(200, Content_Length=len(data), ETag='"v1"')
        handler.body(data)

    with serving(answer) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == FILES


def test_download_fetches_empty_and_large_shards(tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 255, 20 << 20, np.uint8).tobytes()
    files = {INDEX: b'{"weight_map": {"a": "a.bin", "b": "b.bin"}}', "a.bin": b"", "b.bin": large}
    with serving(folder(files)) as server:
        ingot.download(server.url(f"/model/{INDEX}"), tmp_path)
    assert files_in(tmp_path) == files
