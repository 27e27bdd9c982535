"""Servers on loopback: they serve ranges of files correctly, or answer as a test defines."""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Request:
    """A request to a server."""

    path: str
    headers: dict[str, str]

    @property
    def range(self) -> tuple[int, int]:
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"]).groups()
        return int(first), int(last) + 1


@dataclass
class Server:
    """A running server, and its requests."""

    port: int
    host: str = "127.0.0.1"
    requests: list[Request] = field(default_factory=list)
    #: Bytes of bodies that were sent.
    sent: int = 0

    #: A function that replaces its answer.
    replace: Callable[[Answer], None] = lambda answer: None

    def url(self, path: str = "/model.safetensors", scheme: str = "http") -> str:
        return f"{scheme}://{self.host}:{self.port}{path}"


#: A function that answers one request, through the handler or with raw bytes.
Answer = Callable[["Handler", Request], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    # Send heads and bodies without delay.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        request = Request(self.path, {name.lower(): value for name, value in self.headers.items()})
        self.server.facts.requests.append(request)
        self.server.answer(self, request)

    do_CONNECT = do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None:
        pass

    def head(self, status: int, **headers: str | int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def body(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()
        self.server.facts.sent += len(data)

    def part(self, data: bytes, request: Request, **headers: str | int) -> None:
        """Send the requested range of `data` as a good server does, with additional `headers`."""
        begin, end = request.range
        end = min(end, len(data))
        if begin >= len(data):
            self.head(416, Content_Range=f"bytes */{len(data)}", Content_Length=0)
            return
        usual = {"Content_Range": f"bytes {begin}-{end - 1}/{len(data)}", "Content_Length": end - begin}
        self.head(206, **{**usual, **headers})
        self.body(data[begin:end])

    def raw(self, data: bytes) -> None:
        """Send raw bytes, and close the connection."""
        self.close_connection = True
        self.wfile.write(data)
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    facts: Server
    answer: Answer

    def handle_error(self, request: object, client_address: object) -> None:
        # Clients that hang up are part of the tests.
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


#: ingot caches credentials by the address of their service, so that tests must not reuse a port.
_PORTS: set[int] = set()


def _fresh(host: str) -> _Server:
    """Start a server on a port that no earlier server of this process had."""
    while True:
        server = _Server((host, 0), Handler)
        if server.server_port not in _PORTS:
            _PORTS.add(server.server_port)
            return server
        server.server_close()


@contextmanager
def serving(
    answer: Answer, *, tls: object = None, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Server]:
    """Run a server that answers with `answer`, on this port or on one that no server has had yet."""
    server = _Server((host, port), Handler) if port else _fresh(host)
    server.answer = answer
    server.facts = Server(server.server_port, host, replace=lambda new: setattr(server, "answer", new))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.facts
    finally:
        server.shutdown()
        server.server_close()


def good(data: bytes, **headers: str | int) -> Answer:
    """Return the answer of a correct server."""
    return lambda handler, request: handler.part(data, request, **{"ETag": '"v1"', **headers})


def unused_port() -> int:
    """Return a port without a listener, which no other test gets while this process runs."""
    probe = socket.socket()
    # A server that sets it too may listen there.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    probe.detach()
    return port
