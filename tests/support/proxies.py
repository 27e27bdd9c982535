"""Proxies on loopback that speak as their RFCs say: HTTP, and HTTP over TLS."""

from __future__ import annotations

import select
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote

import pytest

#: Every requested name resolves to this address at the proxies.
HOME = "127.0.0.1"


@dataclass
class Proxy:
    """A running proxy, and its requests."""

    scheme: str
    host: str
    port: int = 0
    #: `name:password` if it requires them, encoded as in a URL.
    user: str | None = None
    #: The requested targets: `("name" or "address", host, port)`.
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    #: The heads of the requests to the proxy itself.
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0

    def url(self, user: str | None = None) -> str:
        user = self.user if user is None else user
        return f"{self.scheme}://{user + '@' if user else ''}{self.host}:{self.port}"


class Refused(Exception):
    """The proxy ends the connection."""


def exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise Refused
        data += more
    return data


def relay(a: socket.socket, b: socket.socket) -> None:
    """Copy bytes both ways until one end closes, in one thread: TLS connections are not thread-safe."""
    other = {a: b, b: a}
    while True:
        ready = [end for end in other if isinstance(end, ssl.SSLSocket) and end.pending()]
        for end in ready or select.select([a, b], [], [], 60)[0] or [a]:
            data = end.recv(1 << 16)
            if not data:
                return
            other[end].sendall(data)


def reach(proxy: Proxy, host: str, port: int) -> socket.socket:
    try:
        kind, address = "address", str(ip_address(host.strip("[]")))
    except ValueError:
        kind, address = "name", HOME
    proxy.asked.append((kind, host.strip("[]"), port))
    return socket.create_connection((address, port), timeout=30)


def http(proxy: Proxy, peer: socket.socket) -> None:
    """Handle one request per connection: `CONNECT`, or a request whose target is a whole URL."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += exactly(peer, 1)
    proxy.heads.append(head)
    lines = head.split(b"\r\n")
    if proxy.user is not None:
        word = b"Proxy-Authorization: Basic " + b64encode(unquote(proxy.user).encode())
        if word not in lines:
            peer.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
            return
    method, target, version = lines[0].decode().split(" ")
    if method == "CONNECT":
        host, _, port = target.rpartition(":")
        with closing(reach(proxy, host, int(port))) as server:
            peer.sendall(b"HTTP/1.1 200 Go on\r\n\r\n")
            relay(peer, server)
        return
    authority, slash, path = target.removeprefix("http://").partition("/")
    host, _, port = authority.partition(":")
    kept = [line for line in lines[1:-2] if not line.lower().startswith((b"proxy-", b"connection:"))]
    first = f"{method} {slash}{path} {version}".encode()
    with closing(reach(proxy, host, int(port or 80))) as server:
        server.sendall(b"\r\n".join([first, *kept, b"Connection: close", b"", b""]))
        relay(peer, server)


@contextmanager
def proxying(
    scheme: str,
    *,
    host: str = HOME,
    user: str | None = None,
    tls: ssl.SSLContext | None = None,
    instead: Callable[[socket.socket], None] | None = None,
) -> Iterator[Proxy]:
    """Run a proxy; `instead` replaces its handling of connections."""
    proxy = Proxy(scheme, host, user=user)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            proxy.connections += 1
            with suppress(Refused, OSError):
                self.request.settimeout(60)
                if scheme == "https":
                    self.request = tls.wrap_socket(self.request, server_side=True)
                if instead is not None:
                    instead(self.request)
                else:
                    http(proxy, self.request)
            with suppress(OSError):
                self.request.close()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    with Server((host, 0), Handler) as server:
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()


@dataclass
class Certificate:
    """A certificate for loopback and `model.example`, which a client must trust explicitly."""

    path: Path
    context: ssl.SSLContext


def certificate(folder: Path) -> Certificate:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, path = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", path]
        + ["-subj", "/CN=loopback"]
        + ["-addext", "subjectAltName=DNS:localhost,DNS:model.example,IP:127.0.0.1"]
        + ["-addext", "basicConstraints=critical,CA:FALSE"],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return Certificate(path, context)
