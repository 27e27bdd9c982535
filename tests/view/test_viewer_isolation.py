"""The viewer's server sends no byte of other files, and clients without the token cannot overload it."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._view.server import Server
from ingot._view.shelf import Shelf
from view.made_models import write_raw

# Larger than the buffers of both sockets, so that the answer is still being sent.
LARGE = 64 << 20


def token(url: str) -> str:
    return urlsplit(url).fragment.removeprefix("token=")


def get(url: str, path: str, **fields: str) -> tuple[int, bytes]:
    """Request a path of the server at `url` with its token."""
    address = urlsplit(url)
    headers = {"Authorization": f"Bearer {token(url)}", **fields}
    with closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def listed(url: str) -> list[dict[str, Any]]:
    status, body = get(url, "/files")
    assert status == 200, body
    return [file for model in json.loads(body)["models"] for file in model["files"]]


@contextmanager
def begun(url: str, path: str = "/f/0") -> Iterator[tuple[socket.socket, bytes]]:
    """A request whose answer is being sent, and the first bytes of the answer."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), address.port), timeout=60) as client:
        head = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {token(url)}\r\n\r\n"
        client.sendall(head.encode())
        yield client, client.recv(1 << 16)


def rest(client: socket.socket, got: bytes) -> bytes:
    """The body of an answer, up to the end of the connection."""
    parts = [got]
    while part := client.recv(1 << 20):
        parts.append(part)
    return b"".join(parts).partition(b"\r\n\r\n")[2]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.safetensors"
    ingot.numpy.save_file({"a": numpy.ones(LARGE, numpy.uint8)}, path)
    return path


def test_view_close_ends_answers_without_bytes_of_another_file(tmp_path: Path, large: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"S" * LARGE)
    view = ingot.view(large, how="server")
    with ExitStack() as stack:
        answers = [stack.enter_context(begun(str(view.url))) for _ in range(4)]
        begin = time.monotonic()
        view.close()
        assert time.monotonic() - begin < 10
        # The new files reuse the descriptors of the answers.
        opened = [stack.enter_context(other.open("rb")) for _ in range(8)]
        bodies = [rest(client, got) for client, got in answers]
        assert all(len(body) < LARGE and b"S" not in body for body in bodies)
        assert [file.read(1) for file in opened] == [b"S"] * 8


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_view_close_leaves_no_descriptor(large: Path) -> None:
    before = descriptors()
    view = ingot.view(large, how="server")
    with begun(str(view.url)):
        view.close()
    # On a busy machine a thread may close its descriptor a little later.
    end = time.monotonic() + 30
    while descriptors() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert descriptors() - before == set()
    view.close()


def test_view_close_works_while_an_answer_reads() -> None:
    """A finalizer may close the view in any thread, also in one of the server."""
    data = ingot.numpy.save({"a": numpy.arange(100)})
    views: list[ingot.View] = []

    class Store:
        def head(self, path: str) -> dict[str, int]:
            return {"size": len(data)}

        def get_ranges(self, path: str, *, starts: Any, ends: Any) -> list[bytes]:
            for view in views:
                view.close()
            return [data[begin:end] for begin, end in zip(starts, ends, strict=True)]

    view = ingot.view(ingot.Ranges(Store(), "m.safetensors"), how="server")
    views.append(view)
    with pytest.raises((http.client.HTTPException, OSError)):
        get(str(view.url), "/f/0")


FORKED = """
    import os, sys, time
    import http.client
    from urllib.parse import urlsplit
    import ingot

    view = ingot.view(sys.argv[1], how="server")
    address = urlsplit(view.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    headers = {"Authorization": "Bearer " + address.fragment.removeprefix("token=")}

    def get():
        connection.request("GET", "/f/0", headers=headers)
        return connection.getresponse().read()

    size = os.path.getsize(sys.argv[1])
    assert len(get()) == size
    child = os.fork()
    if child == 0:
        view.close()
        # The parent's end is the client's end, although this process has a copy of each socket.
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    # The child's `close` did not end the parent's connection.
    assert len(get()) == size
    view.close()
    assert connection.sock.recv(1) == b""
    for _ in range(300):
        try:
            http.client.HTTPConnection(address.hostname, address.port, timeout=60).connect()
        except ConnectionRefusedError:
            print("closed")
            break
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_view_close_in_a_forked_child_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ingot.numpy.save_file({"a": numpy.arange(9)}, path)
    code = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED), str(path)]
    ended = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


def test_file_list_is_right_while_ranges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ingot.numpy.save_file({f"t{n}": numpy.full(5000, n, numpy.float32) for n in range(40)}, path)
    data = path.read_bytes()
    stop = threading.Event()
    wrong: list[int] = []
    with ingot.view(path, how="server") as view:
        url = str(view.url)

        def read(begin: int) -> None:
            while not stop.is_set():
                _, body = get(url, "/f/0", Range=f"bytes={begin}-{begin + 4999}")
                if body != data[begin : begin + 5000]:
                    wrong.append(begin)
                begin = (begin + 7919) % (len(data) - 6000)

        readers = [threading.Thread(target=read, args=(1000 * n + 17,)) for n in range(6)]
        for reader in readers:
            reader.start()
        good = listed(url)
        assert all(listed(url) == good for _ in range(100))
        stop.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert b64decode(good[0]["head"]) == data[: good[0]["headNbytes"]]


MANY = """
    import http.client, json, resource, sys
    from urllib.parse import urlsplit
    import ingot

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    for source in (sys.argv[1], ingot.safe_open(sys.argv[1], "np")):
        with ingot.view(source, how="server") as view:
            address = urlsplit(view.url)
            headers = {"Authorization": "Bearer " + address.fragment.removeprefix("token=")}
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)

            def get(path):
                connection.request("GET", path, headers=headers)
                return connection.getresponse().read()

            files = json.loads(get("/files"))["models"][0]["files"]
            assert len(files) == 301, len(files)
            assert all(len(get(f"/f/{file['number']}")) == file["size"] for file in files)
    assert ingot.view(sys.argv[1], how="page")._repr_html_()
    print("shown")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits descriptors")
def test_view_shows_more_shards_than_descriptors(tmp_path: Path) -> None:
    name = "model-{:05}-of-00300.safetensors"
    weight_map = {f"t{n}": name.format(n + 1) for n in range(300)}
    for tensor, file in weight_map.items():
        ingot.numpy.save_file({tensor: numpy.ones(4, numpy.float32)}, tmp_path / file)
    index = json.dumps({"metadata": {"total_size": 4800}, "weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    code = [sys.executable, "-c", textwrap.dedent(MANY), str(tmp_path)]
    ended = subprocess.run(code, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (0, "shown\n"), ended.stderr


# The file at a path may change after the viewer was opened. ---------------------------------------------


def replace_by_rename(path: Path, other: Path) -> None:
    os.replace(other, path)


def replace_by_link(path: Path, other: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.symlink_to(other)


def replace_by_fifo(path: Path, other: Path) -> None:
    path.rename(path.with_suffix(".old"))
    os.mkfifo(path)


def remove(path: Path, other: Path) -> None:
    path.unlink()


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFO")
@pytest.mark.parametrize("change", [replace_by_rename, replace_by_link, replace_by_fifo, remove])
def test_server_rejects_a_replaced_file(tmp_path: Path, change: Callable[[Path, Path], None]) -> None:
    path, other = tmp_path / "m.safetensors", tmp_path / "other"
    ingot.numpy.save_file({"a": numpy.arange(9)}, path)
    other.write_bytes(b"S" * 1000)
    with ingot.view(path, how="server") as view:
        assert get(str(view.url), "/f/0") == (200, path.read_bytes())
        change(path, other)
        for place in ("/f/0", "/files"):
            status, body = get(str(view.url), place)
            assert status in (409, 503)
            assert str(path).encode() in body


def test_view_keeps_the_folder_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        ingot.numpy.save_file({"a": numpy.full(9, n)}, tmp_path / name / "m.safetensors")
    monkeypatch.chdir(tmp_path / "one")
    with ingot.view("m.safetensors", how="server") as view:
        monkeypatch.chdir(tmp_path / "two")
        assert get(str(view.url), "/f/0")[1] == (tmp_path / "one" / "m.safetensors").read_bytes()


# config.json. -------------------------------------------------------------------------------------------


def of_bytes_io(folder: Path, data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


def of_memory(folder: Path, data: bytes) -> memoryview:
    return memoryview(data)


def of_zip(folder: Path, data: bytes) -> Any:
    with zipfile.ZipFile(folder / "m.zip", "w") as archive:
        archive.writestr("m.safetensors", data)
    return zipfile.ZipFile(folder / "m.zip").open("m.safetensors")


def of_store(folder: Path, data: bytes) -> ingot.Ranges:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/m.safetensors", data)
    return ingot.Ranges(store, "/m.safetensors")


def of_fsspec(folder: Path, data: bytes) -> Any:
    of_store(folder, data)
    return pytest.importorskip("fsspec").open("memory://m.safetensors")


OBJECTS: list[Callable[[Path, bytes], Any]] = [
    of_bytes_io,
    of_memory,
    of_zip,
    of_store,
    of_fsspec,
]


@pytest.mark.parametrize("made", OBJECTS)
@pytest.mark.parametrize("is_open", [False, True])
def test_view_of_an_object_has_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path, bytes], Any], is_open: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of another model"}))
    monkeypatch.chdir(tmp_path)
    source = made(tmp_path, ingot.numpy.save({"a": numpy.arange(9)}))
    source = ingot.safe_open(source, "np") if is_open else source
    with ingot.view(source, how="server") as view:
        assert [file["name"].rpartition(".")[2] for file in listed(str(view.url))] == ["safetensors"]


def test_view_of_a_handle_has_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder, kind in ((model, "right"), (elsewhere, "wrong")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    ingot.numpy.save_file({"a": numpy.arange(9)}, model / "model.safetensors")
    for source in (model, model / "model.safetensors", "model", "model/model.safetensors"):
        monkeypatch.chdir(tmp_path)
        handle = ingot.safe_open(source, "np")
        monkeypatch.chdir(elsewhere)
        with handle, ingot.view(handle, how="server") as view:
            names = [file["name"] for file in listed(str(view.url))]
            assert names == ["model.safetensors", "config.json"]
            assert b"right" in get(str(view.url), "/f/1")[1]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFO")
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, make_socket])
@pytest.mark.parametrize("how", ["server", "page"])
def test_view_skips_a_configuration_that_is_no_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], how: str
) -> None:
    ingot.numpy.save_file({"a": numpy.arange(9)}, tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    make(Path("config.json"))
    for source in (tmp_path, tmp_path / "m.safetensors", ingot.safe_open("m.safetensors", "np")):
        with ingot.view(source, how=how) as view:
            assert view.url is None or [file["name"] for file in listed(view.url)] == ["m.safetensors"]


# Reads for a range. -----------------------------------------------------------------------------------


class Counting:
    """A store that counts the bytes that it sends."""

    def __init__(self, data: bytes) -> None:
        self.data, self.sent = data, 0

    def head(self, path: str) -> dict[str, int]:
        return {"size": len(self.data)}

    def get_ranges(self, path: str, *, starts: Any, ends: Any) -> list[bytes]:
        parts = [self.data[begin:end] for begin, end in zip(starts, ends, strict=True)]
        self.sent += sum(map(len, parts))
        return parts


SHAPES = [
    ("F4", (1 << 20,), 4),
    ("F4", (4099, 1026), 4),
    ("F4", (1026, 3), 4),
    ("F6_E2M3", (4, 4099), 6),
    ("F6_E3M2", (3, 5, 4), 6),
    ("F8_E4M3", (1000, 333), 8),
    ("U8", (7,), 8),
    ("C64", (300, 21), 64),
    ("F64", (), 64),
]


@pytest.mark.parametrize(("dtype", "shape", "nbits"), SHAPES)
def test_server_reads_only_a_range(tmp_path: Path, dtype: str, shape: tuple[int, ...], nbits: int) -> None:
    random = numpy.random.default_rng(0)
    nbytes = int(numpy.prod(shape, dtype=int)) * nbits // 8
    tensors = {
        "a": ("U8", (5,), b"abcde"),
        "x": (dtype, shape, random.bytes(nbytes)),
        "z": ("I8", (3,), b"xyz"),
    }
    data = write_raw(tmp_path / "m.safetensors", tensors).read_bytes()
    store = Counting(data)
    with ingot.view(ingot.Ranges(store, "m.safetensors"), how="server") as view:
        whole = get(str(view.url), "/f/0")[1]
        first = 8 + int.from_bytes(whole[:8], "little")
        assert whole[first:] == data[8 + int.from_bytes(data[:8], "little") :]
        for begin in (*random.integers(first, len(whole), 20).tolist(), first, len(whole) - 1):
            end = min(len(whole), begin + int(random.integers(1, 2000)))
            store.sent = 0
            status, body = get(str(view.url), "/f/0", Range=f"bytes={begin}-{end - 1}")
            assert (status, body) == (206, whole[begin:end])
            assert store.sent <= end - begin


# Clients without the token. -----------------------------------------------------------------------------


def silent(client: socket.socket) -> None:
    """Send nothing."""


def half(client: socket.socket) -> None:
    """Send a request without its end."""
    client.sendall(b"GET / HTTP/1.1\r\nHost: 127")


def unread(client: socket.socket) -> None:
    """Request the page many times, and read no answer."""
    host, port = client.getpeername()
    client.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode() * 50)


def wrong(client: socket.socket) -> None:
    """Request data with a wrong token, and keep the connection."""
    host, port = client.getpeername()
    client.sendall(f"GET /f/0 HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer x\r\n\r\n".encode())


def test_server_answers_beside_slow_clients(large: Path) -> None:
    shelf = Shelf([str(large)])
    with closing(Server(shelf)) as server, ExitStack() as stack:
        address = urlsplit(server.url)
        client, got = stack.enter_context(begun(server.url))
        slow = []
        for act in itertools.islice(itertools.cycle((silent, half, unread, wrong)), 400):
            one = stack.enter_context(
                socket.create_connection((str(address.hostname), address.port), timeout=60)
            )
            slow.append(one)
            with suppress(OSError):
                act(one)
            if len(slow) % 40 == 0:
                assert get(server.url, "/")[0] == 200
                assert get(server.url, "/f/0", Range="bytes=0-9")[0] == 206
        # The server has few threads, and the answer that was being sent is complete.
        assert threading.active_count() < 200
        parts = len(got.partition(b"\r\n\r\n")[2])
        while parts < large.stat().st_size:
            parts += len(client.recv(1 << 20))


def test_ticket_works_once_for_concurrent_clients(large: Path) -> None:
    shelf = Shelf([str(large)])
    with closing(Server(shelf)) as server:
        path = urlsplit(server.ticket()).path
        statuses: list[int] = []
        clients = [
            threading.Thread(target=lambda: statuses.append(get(server.url, path)[0])) for _ in range(16)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert sorted(statuses) == [303] + [404] * 15
