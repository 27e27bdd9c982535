"""Downloads: in parts, resumed after a break, verified, and never visible as an incomplete file."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot
from support.progress import Progress, Stopped, stop
from support.servers import Answer, Handler, Request, Server, good, serving

MIB = 1 << 20
DATA = bytes(range(256)) * (12 * MIB // 256) + b"end"
OTHER = DATA[::-1]
SHA256 = hashlib.sha256(DATA).hexdigest()
QUICK = {"retries": 0, "stall_timeout": 5}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(good(DATA)) as server:
        yield server


def part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.ingot-part")


def test_download_fetches_each_part_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    done = ingot.download(server.url("/x.bin"), path)
    assert path.read_bytes() == DATA
    assert done == ingot.Download(str(path), len(DATA), len(DATA), None)
    assert len(server.requests) >= 12
    assert server.sent < len(DATA) + MIB
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 3 * MIB])
def test_download_fetches_files_of_any_size(tmp_path: Path, size: int) -> None:
    data = DATA[:size]
    with serving(good(data)) as server:
        done = ingot.download(
            server.url("/x"), tmp_path / "x", expected_sha256=hashlib.sha256(data).hexdigest()
        )
    assert (tmp_path / "x").read_bytes() == data
    assert done.nbytes == size
    assert done.sha256 == hashlib.sha256(data).hexdigest()


def test_download_into_a_directory_uses_the_name_of_the_url(server: Server, tmp_path: Path) -> None:
    assert ingot.download(server.url("/a/m%20x.bin?sig=secret"), tmp_path).path == str(tmp_path / "m x.bin")
    with pytest.raises(ingot.OptionError, match="gives no name") as caught:
        ingot.download(server.url("/a/%2E%2E?sig=secret"), tmp_path)
    assert "secret" not in str(caught.value)


def test_download_creates_files_with_the_usual_mode(server: Server, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        ingot.download(server.url("/x"), tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_download_compares_the_digest(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.download(server.url("/x"), path, expected_sha256="ab" * 32, overwrite=True)
    assert (caught.value.code, caught.value.path) == ("digest-mismatch", server.url("/x"))
    assert (caught.value.expected, caught.value.found) == ("ab" * 32, SHA256)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert ingot.download(server.url("/x"), path, expected_sha256=SHA256, overwrite=True).sha256 == SHA256


def test_download_reports_progress_and_may_be_stopped(server: Server, tmp_path: Path) -> None:
    told = Progress()
    ingot.download(server.url("/x"), tmp_path / "x", progress=told)
    told.assert_complete(len(DATA))

    with pytest.raises(Stopped):
        ingot.download(server.url("/y"), tmp_path / "y", progress=stop)
    assert not (tmp_path / "y").exists()


def test_download_of_a_missing_file_leaves_nothing(tmp_path: Path) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(404, Content_Length=0)

    with serving(answer) as server, pytest.raises(FileNotFoundError):
        ingot.download(server.url("/x"), tmp_path / "x")
    with serving(answer) as server, pytest.raises(FileNotFoundError):
        ingot.download(server.url("/x"), f"{tmp_path}/new/folder/")
    with pytest.raises(ingot.OptionError):
        ingot.download(str(tmp_path / "near"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# Resuming


def breaking(data: bytes, etag: str = '"v1"', after: int = 6) -> Answer:
    """Return the answer of a server that fails permanently after this number of parts, within a part."""
    count = [0]
    lock = threading.Lock()

    def answer(handler: Handler, request: Request) -> None:
        with lock:
            count[0] += 1
            is_good = count[0] <= after
        if is_good:
            handler.part(data, request, ETag=etag)
            return
        begin, end = request.range
        end = min(end, len(data))
        handler.head(
            206, Content_Range=f"bytes {begin}-{end - 1}/{len(data)}", Content_Length=end - begin, ETag=etag
        )
        handler.raw(data[begin : begin + (end - begin) // 2])

    return answer


def broken_off(path: Path, answer: Answer | None = None) -> Server:
    """Start a download to `path` that fails, and return the server."""
    with serving(answer or breaking(DATA)) as server:
        with pytest.raises(ingot.StorageError) as caught:
            ingot.download(server.url("/x"), path, storage_options=QUICK, threads=2)
        assert caught.value.code in ("short-read", "connection-broken")
        assert str(caught.value).startswith(server.url("/x"))
    assert not path.exists()
    return server


def again(path: Path, server: Server, answer: Answer, **options: object) -> ingot.Download:
    """Start the download again, from the same address."""
    with serving(answer, port=server.port) as server_again:
        done = ingot.download(server_again.url("/x"), path, **options)
        assert server_again.sent <= done.fetched + MIB
    return done


def test_download_resumes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    server = broken_off(path)
    assert part_of(path).exists()
    done = again(path, server, good(DATA), expected_sha256=SHA256)
    assert path.read_bytes() == DATA
    assert len(DATA) - 7 * MIB <= done.fetched <= len(DATA) - 2 * MIB
    assert list(tmp_path.iterdir()) == [path]


def test_download_resumes_after_any_number_of_breaks(tmp_path: Path) -> None:
    path = tmp_path / "x"
    server = broken_off(path)
    for _ in range(2):
        broken = serving(breaking(DATA, after=1), port=server.port)
        with broken as server_again, pytest.raises(ingot.StorageError):
            ingot.download(server_again.url("/x"), path, storage_options=QUICK, threads=2)
    assert again(path, server, good(DATA), expected_sha256=SHA256).fetched <= len(DATA) - 2 * MIB


def test_n9_download_of_another_version_restarts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    server = broken_off(path)
    done = again(path, server, good(OTHER, ETag='"v2"'))
    assert path.read_bytes() == OTHER
    assert done.fetched == len(OTHER)


def test_n9_download_without_a_version_restarts(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def nameless(data: bytes) -> Answer:
        return lambda handler, request: handler.part(data, request)

    count = [0]

    def answer(handler: Handler, request: Request) -> None:
        count[0] += 1
        if count[0] <= 6:
            handler.part(DATA, request)
        else:
            handler.raw(b"")

    server = broken_off(path, answer)
    assert not part_of(path).exists()
    assert again(path, server, nameless(OTHER)).fetched == len(OTHER)
    assert path.read_bytes() == OTHER


def test_download_fetches_changed_or_lost_parts_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    server = broken_off(path)
    with part_of(path).open("r+b") as file:
        file.seek(MIB + 7)
        file.write(b"?")
        file.seek(0)
        file.write(bytes(MIB))
    again(path, server, good(DATA), expected_sha256=SHA256)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("damage", ["cut", "longer", "text", "notes"])
def test_download_ignores_an_invalid_journal(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x"
    server = broken_off(path)
    kept = part_of(path).read_bytes()
    changed = {
        "cut": kept[:-1],
        "longer": kept + b"?",
        "text": b"some text",
        "notes": kept[: len(DATA)] + bytes([kept[len(DATA)] ^ 1]) + kept[len(DATA) + 1 :],
    }
    part_of(path).write_bytes(changed[damage])
    assert again(path, server, good(DATA)).fetched == len(DATA)
    assert path.read_bytes() == DATA


def test_download_resumes_with_another_signature_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with serving(breaking(DATA)) as server:
        with pytest.raises(ingot.StorageError):
            ingot.download(
                server.url("/get?name=a&X-Amz-Signature=1"), path, storage_options=QUICK, threads=2
            )
        kept = part_of(path).read_bytes()
    with serving(good(DATA), port=server.port) as server:
        assert ingot.download(server.url("/get?name=a&X-Amz-Signature=2"), path).fetched < len(DATA)
        path.unlink()
        part_of(path).write_bytes(kept)
        assert ingot.download(server.url("/get?name=b&X-Amz-Signature=1"), path).fetched == len(DATA)


def slowly(data: bytes) -> Answer:
    """Return the answer of a server that sends the first half and then stalls."""

    def answer(handler: Handler, request: Request) -> None:
        if request.range[0] < len(data) // 2:
            handler.part(data, request, ETag='"v1"')
        else:
            time.sleep(20)

    return answer


def test_download_resumes_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "x"
    script = """
        import sys, ingot
        def progress(done, total): print(done, flush=True)
        ingot.download(sys.argv[1], sys.argv[2], threads=2, progress=progress)
    """
    with (
        serving(slowly(DATA)) as server,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), server.url("/x"), path],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 5 * MIB:
                break
        # While it lives, no other process fetches the file.
        with pytest.raises(ingot.StorageError) as caught:
            ingot.download(server.url("/x"), path)
        assert caught.value.code == "busy"
        process.kill()
        process.wait()
    assert not path.exists()
    done = again(path, server, good(DATA), expected_sha256=SHA256)
    assert path.read_bytes() == DATA
    assert done.fetched <= len(DATA) - 5 * MIB


def test_download_resumes_after_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def progress(done: int, total: int) -> None:
        if done >= 5 * MIB:
            signal.raise_signal(signal.SIGINT)

    with serving(slowly(DATA)) as server, pytest.raises(KeyboardInterrupt):
        ingot.download(server.url("/x"), path, progress=progress, threads=2)
    assert not path.exists()
    assert again(path, server, good(DATA)).fetched <= len(DATA) - 5 * MIB


# Servers without ranges


def whole(data: bytes, etag: str = '"v1"') -> Answer:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(data), ETag=etag)
        handler.body(data)

    return answer


def test_download_restarts_without_ranges(tmp_path: Path) -> None:
    with serving(whole(DATA)) as server:
        done = ingot.download(server.url("/x"), tmp_path / "x", expected_sha256=SHA256)
        assert done.nbytes == len(DATA)
    assert (tmp_path / "x").read_bytes() == DATA


def test_download_that_breaks_off_without_ranges_restarts(tmp_path: Path) -> None:
    count = [0]

    def answer(handler: Handler, request: Request) -> None:
        count[0] += 1
        if count[0] == 2:
            handler.head(200, Content_Length=len(DATA), ETag='"v1"')
            handler.raw(DATA[: len(DATA) // 2])
        else:
            whole(DATA)(handler, request)

    with serving(answer) as server:
        ingot.download(server.url("/x"), tmp_path / "x", expected_sha256=SHA256)
    assert (tmp_path / "x").read_bytes() == DATA


# Destinations


def test_n15_download_does_not_write_through_a_link(server: Server, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "x"
    part_of(path).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        ingot.download(server.url("/x"), path)
    part_of(path).unlink()
    part_of(path).hardlink_to(victim)
    with pytest.raises(OSError, match="is not a file of this user"):
        ingot.download(server.url("/x"), path)
    assert victim.read_bytes() == b"precious"


def test_download_survives_a_save_beside_it(tmp_path: Path) -> None:
    import numpy as np

    import ingot.numpy

    path = tmp_path / "x"
    server = broken_off(path)
    ingot.numpy.save_file({"a": np.zeros(3)}, path)
    assert part_of(path).exists()
    assert again(path, server, good(DATA), overwrite=True).fetched < len(DATA)
