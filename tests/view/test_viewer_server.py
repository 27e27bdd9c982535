"""The server of the viewer: allowed and rejected requests."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._view.server import Server
from ingot._view.shelf import Shelf
from support.commands import command_line, environment, run
from support.servers import good, serving

DATA = ingot.numpy.save(
    {
        "a": numpy.arange(1000, dtype=numpy.float32).reshape(10, 100),
        "b": numpy.arange(24, dtype=numpy.int16).reshape(2, 1, 3, 4),
        "none": numpy.zeros((0, 3), numpy.float32),
        "one": numpy.float64(1.5),
    },
    {"format": "pt"},
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    shelf = Shelf([str(model)])
    server = Server(shelf)
    yield server
    server.close()
    shelf.close()


class Answer:
    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = found.status, found.headers, found.read()


def ask(server: Server, path: str, method: str = "GET", *, token: bool = True, **fields: str) -> Answer:
    address = urlsplit(server.url)
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    if token:
        headers["Authorization"] = "Bearer " + address.fragment.removeprefix("token=")
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_server_listens_on_loopback_only(server: Server) -> None:
    assert server.origin.startswith("http://127.0.0.1:")
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", int(server.origin.rpartition(":")[2])))


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        (None, 200, slice(None)),
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=5-", 206, slice(5, None)),
        (f"bytes=8-{len(DATA) + 100}", 206, slice(8, None)),
        (f"bytes={len(DATA)}-", 416, slice(0)),
        ("bytes=5-4", 416, slice(0)),
        ("bytes=-5", 416, slice(0)),
        ("bytes=0-1,3-4", 416, slice(0)),
        ("bytes=" + "9" * 5000 + "-", 416, slice(0)),
        ("items=0-1", 416, slice(0)),
    ],
)
def test_server_answers_ranges(server: Server, asked: str | None, status: int, expected: slice) -> None:
    found = ask(server, "/f/0", **({} if asked is None else {"Range": asked}))
    assert found.status == status
    assert found.body == DATA[expected]
    begin, end, _ = expected.indices(len(DATA))
    if status == 206:
        assert found.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{len(DATA)}"
    if status == 416:
        assert found.headers["Content-Range"] == f"bytes */{len(DATA)}"


def test_server_answers_ranges_of_concurrent_clients(server: Server) -> None:
    ranges = [(begin, begin + 301) for begin in range(0, len(DATA) - 301, 97)]
    asked = [f"bytes={begin}-{end - 1}" for begin, end in ranges]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda value: ask(server, "/f/0", Range=value).body, asked))
    assert found == [DATA[begin:end] for begin, end in ranges]


def test_server_lists_header_lengths(tmp_path: Path) -> None:
    length = int.from_bytes(DATA[:8], "little")
    texts = {
        "whole": (DATA, 8 + length),
        "cut": (DATA[: 8 + length - 1], None),
        "short": (b"1234567", None),
        "empty": (b"", None),
        "none": (bytes(16), None),
        "text": (b"PK\x03\x04 something else", None),
    }
    for name, (data, expected) in texts.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(data)
        shelf = Shelf([str(path)])
        [[listed]] = [model["files"] for model in shelf.listed()["models"]]
        assert listed["headNbytes"] == expected, name


def test_server_sends_the_whole_file_for_a_range_of_another_version(server: Server, model: Path) -> None:
    before = ask(server, "/f/0", "HEAD")
    assert (before.status, before.body) == (200, b"")
    assert before.headers["Content-Length"] == str(len(DATA))
    same = ask(server, "/f/0", Range="bytes=0-1", If_Range=before.headers["ETag"])
    assert same.status == 206
    os.utime(model, (1, 1))
    other = ask(server, "/f/0", Range="bytes=0-1", If_Range=before.headers["ETag"])
    assert (other.status, len(other.body)) == (200, len(DATA))
    assert other.headers["ETag"] != before.headers["ETag"]


@pytest.mark.parametrize("path", ["/files", "/f/0"])
def test_server_needs_the_token_for_data(server: Server, path: str) -> None:
    assert ask(server, path).status == 200
    assert ask(server, path, token=False).status == 401
    assert ask(server, path, token=False, Authorization="Bearer ").status == 401
    assert ask(server, path, token=False, Authorization="Bearer wrong\xff").status == 401
    token = urlsplit(server.url).fragment.removeprefix("token=")
    assert ask(server, f"{path}?token={token}", token=False).status == 401
    assert ask(server, path, token=False, Cookie=f"token={token}").status == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "[::1]", ""])
def test_server_rejects_another_host_name(server: Server, host: str) -> None:
    for path in ("/", "/files", "/f/0"):
        assert ask(server, path, Host=host).status == 421


def test_server_rejects_two_host_names(server: Server) -> None:
    address = urlsplit(server.origin)
    with socket.create_connection((str(address.hostname), address.port)) as client:
        client.sendall(f"GET / HTTP/1.1\r\nHost: {address.netloc}\r\nHost: {address.netloc}\r\n\r\n".encode())
        assert b" 421 " in client.recv(100)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
def test_server_sends_no_data_to_other_sites(server: Server, site: str) -> None:
    assert ask(server, "/f/0", Sec_Fetch_Site=site).status == 403
    assert ask(server, "/files", Sec_Fetch_Site=site).status == 403
    # The page itself contains no secret, and other sites may link to it.
    assert ask(server, "/", Sec_Fetch_Site=site).status == 200


def test_view_refuses_data_to_pages_of_another_origin(server: Server) -> None:
    port = urlsplit(server.origin).port
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
        assert ask(server, "/f/0", Origin=origin).status == 200
    others = ("http://evil.example", f"http://evil.example:{port}", f"https://127.0.0.1:{port}", "null", "")
    for origin in (*others, "http://127.0.0.1", f"http://127.0.0.1:{port}/"):
        assert ask(server, "/f/0", Origin=origin).status == 403, origin
        assert ask(server, "/files", Origin=origin).status == 403, origin


@pytest.mark.parametrize(
    "path",
    [
        *("/f/1", "/f/-1", "/f/00000000", "/f/x", "/f/0/", "/f/../f/0x", "/f/%30", "/f/0?x=1"),
        *("/../pyproject.toml", "/viewer/../../errors.py", "/etc/passwd", "/model.safetensors", "/viewer/"),
        *(
            "/viewer.html",
            "/index.js",
            "/viewer/jobs.js",
            "/viewer/%2e%2e/index.js",
            "/package.json",
            "/README.md",
        ),
    ],
)
def test_server_serves_the_page_and_listed_files_only(server: Server, path: str) -> None:
    assert ask(server, path).status in (400, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_server_accepts_reads_only(server: Server, method: str) -> None:
    assert ask(server, "/f/0", method).status == 501


def test_server_sends_security_headers(server: Server) -> None:
    for path, token in (("/", False), ("/f/0", True), ("/f/0", False), ("/nothing", True)):
        headers = ask(server, path, token=token).headers
        policy = headers["Content-Security-Policy"]
        assert re.match(
            r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+'; "
            r"connect-src 'self'; img-src data: blob:; worker-src blob:; base-uri 'none'; ",
            policy,
        )
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert (
            headers["Cross-Origin-Opener-Policy"] == headers["Cross-Origin-Resource-Policy"] == "same-origin"
        )
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_server_accepts_a_ticket_once(server: Server) -> None:
    path = urlsplit(server.ticket()).path
    first = ask(server, path, token=False)
    assert (first.status, first.headers["Location"]) == (303, "/#" + urlsplit(server.url).fragment)
    assert ask(server, path, token=False).status == 401
    assert ask(server, path).status == 404


def test_server_rejects_too_many_headers(server: Server) -> None:
    assert ask(server, "/f/0", **{f"X-{number}": "y" for number in range(80)}).status == 431


@pytest.mark.parametrize("kind", ["fifo", "directory", "missing"])
def test_view_rejects_an_invalid_file_at_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "directory":
        path.mkdir()
    ended = run("view", "--no-browser", path)
    assert ended.code == (2 if kind == "missing" else 1)
    assert str(path) in ended.err


def test_server_reads_remote_files_through_ingot(tmp_path: Path) -> None:
    from view.made_models import write_raw

    path = write_raw(
        tmp_path / "nibbles.safetensors", {"x": ("F4", (3, 2), b"abc"), "y": ("F6_E2M3", (4,), b"abc")}
    )
    for data in (DATA, path.read_bytes()):
        with serving(good(data)) as store:
            shelf = Shelf([store.url("/model.safetensors?sig=s3cret")])
            server = Server(shelf)
            try:
                listed = shelf.listed()
                assert "s3cret" not in str(listed)
                whole = ask(server, "/f/0").body
                size = 8 + int.from_bytes(whole[:8], "little")
                assert whole[size:] == data[8 + int.from_bytes(data[:8], "little") :]
                assert ingot.deserialize(whole) == ingot.deserialize(data)
                for begin in range(0, len(whole), 37):
                    end = min(len(whole), begin + 501)
                    found = ask(server, "/f/0", Range=f"bytes={begin}-{end - 1}")
                    assert found.body == whole[begin:end]
            finally:
                server.close()
                shelf.close()


def test_server_joins_large_remote_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot._view import shelf as shelf_module

    array = numpy.random.default_rng(0).integers(0, 255, (2, 3, 50, 7), dtype=numpy.uint8)
    data = ingot.numpy.save({"x": array, "y": numpy.arange(500, dtype=numpy.int32)})
    for piece in (1, 16, 1000):
        monkeypatch.setattr(shelf_module, "_PIECE", piece)
        with serving(good(data)) as store:
            shelf = Shelf([store.url("/model.safetensors")])
            file = shelf.files[0]
            assert not isinstance(file, shelf_module.LocalFile)
            whole = file.read(0, file.size)
            assert whole[-4100:] == data[-4100:]
            for begin, end in ((300, 301), (400, 2400), (file.size - 777, file.size)):
                assert file.read(begin, end) == whole[begin:end]


def test_view_command_serves_until_ctrl_c(model: Path) -> None:
    process = subprocess.Popen(
        command_line("view", "--no-browser", model), stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{32}", url)
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(2)
    assert process.wait(60) == 0
    process.stdout.close()


def test_view_command_rejects_three_paths(model: Path) -> None:
    ended = run("view", model, model, model)
    assert ended.code == 2
    assert "expected one PATH, or two to compare, found 3" in ended.err
