"""A server for the viewer: it gives the page, and ranges of the files on a shelf, to who has the token.

It listens on 127.0.0.1 only. What keeps other pages, and other users of the machine, from the files: the name
by which it is called has to be its own (a page elsewhere may have its name resolve to 127.0.0.1), data is not
given to requests that other sites caused, and it takes a token that no request carries by itself.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import BoundedSemaphore, Thread

from .shelf import LocalFile, Shelf
from .whole import Parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from typing import Any

    from .shelf import File

# A browser opens six for one page.
_MOST_CONNECTIONS = 32
# Seconds that a connection may lie idle, or a client may take none of the bytes it asked for.
_PATIENCE = 60
_MOST_FIELDS = 64
# Without it `socket.sendfile` would read by the place in the file that all threads share.
_SENDS_FILES = hasattr(os, "sendfile")
_RANGE = re.compile(r"bytes=(\d{1,16})-(\d{0,16})")
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self' {script}; style-src {style}; connect-src 'self'; "
    "img-src data: blob:; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)


class Server:
    """Serves a shelf until it is closed, from threads of its own.

    Parameters
    ----------
    shelf
        The files. It stays the caller's.
    port
        Of 127.0.0.1. 0 takes one that is free.
    ancestors
        The pages that may show this one in a frame, as the content security policy has them.
    """

    def __init__(self, shelf: Shelf, port: int = 0, ancestors: str = "'none'") -> None:
        # Loaded before the first request, so that a fault is one of the start.
        hashes = _page().hashes
        _static()
        self._http = _Http(shelf, port, _POLICY.format(ancestors=ancestors, **hashes))
        # Seconds until it notices that it is to end.
        serve = partial(self._http.serve_forever, poll_interval=0.1)
        self._thread = Thread(target=serve, name="ingot-view", daemon=True)
        self._thread.start()

    @property
    def origin(self) -> str:
        """Where it listens: ``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        """The address of the page, with the token in its fragment: no request and no log has that."""
        return f"{self.origin}/#token={self._http.token}"

    def ticket(self) -> str:
        """An address that leads to the page once: for command lines, which other users can read."""
        self._http.tickets.add(ticket := f"/open/{secrets.token_urlsafe(24)}")
        return self.origin + ticket

    def close(self) -> None:
        """End it. Answers that are under way break off."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, shelf: Shelf, port: int, policy: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.shelf = shelf
        self.policy = policy
        self.token = secrets.token_urlsafe(24)
        self.tickets: set[str] = set()
        self.names = {f"{host}:{self.server_port}" for host in ("127.0.0.1", "localhost")}
        self._room = BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: browsers break off what they no longer want."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ingot"
    sys_version = ""
    timeout = _PATIENCE
    disable_nagle_algorithm = True
    server: _Http  # pyright: ignore[reportIncompatibleVariableOverride]
    connection: socket

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""

    def _answer(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            # A body that nobody reads would be taken for the next request.
            self.close_connection = True
        if len(self.headers) > _MOST_FIELDS:
            return self._refuse(431, "too many header fields")
        if self._only("Host") not in self.server.names:
            return self._refuse(421, "this server has another name")
        if self.path in _static():
            return self._give(*_static()[self.path])
        if self.path in self.server.tickets:
            self.server.tickets.remove(self.path)
            return self._head(303, 0, {"Location": f"/#token={self.server.token}"})
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return self._refuse(403, "another site asks")
        given = (self._only("Authorization") or "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return self._refuse(401, "the token is missing or wrong")
        if self.path == "/files":
            return self._give(json.dumps(self.server.shelf.listed()).encode(), "application/json")
        number = re.fullmatch(r"/f/(\d{1,6})", self.path)
        if number is None or int(number[1]) >= len(self.server.shelf.files):
            return self._refuse(404, "no such file")
        return self._give_range(self.server.shelf.files[int(number[1])])

    def _only(self, field: str) -> str | None:
        """The value of a header field that stands in the request once."""
        values = self.headers.get_all(field, [])
        return values[0] if len(values) == 1 else None

    def _give(self, body: bytes, kind: str) -> None:
        self._head(200, len(body), {"Content-Type": kind})
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, reason: str) -> None:
        body = f"{reason}\n".encode()
        self._head(status, len(body), {"Content-Type": "text/plain"})
        if self.command == "GET":
            self.wfile.write(body)

    def _give_range(self, file: File) -> None:
        version, size = f'"{file.version}"', file.size
        fields = {"Content-Type": "application/octet-stream", "ETag": version, "Accept-Ranges": "bytes"}
        asked = self._only("Range")
        # Of an empty file there is no range; a refusal would stand on the console of the page.
        if asked is None or size == 0 or self.headers.get("If-Range", version) != version:
            return self._body(file, 0, size, 200, fields)
        match = _RANGE.fullmatch(asked)
        begin = int(match[1]) if match else size
        end = min(size, int(match[2]) + 1 if match and match[2] else size)
        if begin >= end:
            self._head(416, 0, {"Content-Range": f"bytes */{size}", "ETag": version})
            return None
        return self._body(
            file, begin, end, 206, fields | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        )

    def _body(self, file: File, begin: int, end: int, status: int, fields: dict[str, str]) -> None:
        self._head(status, end - begin, fields)
        if self.command == "HEAD" or begin == end:
            return
        # Whatever breaks off in the middle must not be followed by another answer.
        self.close_connection, keep = True, self.close_connection
        if isinstance(file, LocalFile) and _SENDS_FILES:
            sent = self.connection.sendfile(file.stream, begin, end - begin)
        else:
            sent = sum(self.wfile.write(piece) for piece in file.pieces(begin, end))
        self.close_connection = keep or sent != end - begin

    def _head(self, status: int, nbytes: int, fields: dict[str, str]) -> None:
        self.send_response(status)
        always = {
            "Content-Length": str(nbytes),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in (always | fields).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


@cache
def _page() -> Parts:
    return Parts(files("ingot") / "web")


@cache
def _static() -> dict[str, tuple[bytes, str]]:
    """The page, by the path of its address, and the modules that it is made of.

    The page is one document: a browser asks for modules one level after the other, and waits for each.
    """
    web = files("ingot") / "web"
    found = {"/": (_page().page().encode(), "text/html; charset=utf-8")}
    for folder, above in ((web, "/"), (web / "viewer", "/viewer/")):
        for file in folder.iterdir():
            kind = _TYPES.get(file.name[file.name.rfind(".") :])
            if kind is not None:
                found[above + file.name] = (file.read_bytes(), f"{kind}; charset=utf-8")
    return found
