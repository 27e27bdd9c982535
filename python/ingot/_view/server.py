"""The viewer's server: it serves the page and, to clients with the token, byte ranges of files.

It listens on 127.0.0.1 only. Three rules protect the files from other pages and other users of the machine.
The Host header must be the server's own name, because another page's host name may resolve to 127.0.0.1.
Requests that other sites cause get no data. Data requires a token, which browsers do not send by themselves.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from threading import Condition, Event, Thread, current_thread
from urllib.parse import quote

from ingot.errors import SafetensorError

from . import report
from .shelf import Shelf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .shelf import OpenFile

# A browser opens six for one page.
_MOST_CONNECTIONS = 64
# Seconds that a connection may be idle, or that a client may read nothing of its answer.
_PATIENCE = 60
# Seconds between two looks at whether the server is closed.
_POLL = 0.1
# The time in seconds that `close` waits for answers to end. An answer that reads a remote file may take
# longer.
_CLOSING = 1
_MOST_FIELDS = 64
# The most characters of a reason in a header field.
_MOST_REASON = 1000
# Characters of that field that are not encoded.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_RANGE = re.compile(r"bytes=(\d{1,16})-(\d{0,16})")


class Server:
    """Serve a shelf until `close`, from threads of its own.

    Parameters
    ----------
    shelf
        The files. The caller closes it after the server.
    port
        A port of 127.0.0.1. 0 takes a free one.
    ancestors
        The pages that may show the viewer in a frame, in the syntax of the content security policy.
    """

    def __init__(self, shelf: Shelf, port: int = 0, ancestors: str = "'none'") -> None:
        # A served page sends no request to other hosts.
        own = report.policy().replace("connect-src 'self' https: blob:", "connect-src 'self'")
        self.policy = f"{own}; frame-ancestors {ancestors}"
        self.shelf = shelf
        self.token = secrets.token_urlsafe(24)
        self.tickets: set[str] = set()
        self.connections = _Connections(_MOST_CONNECTIONS)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.settimeout(_POLL)
        self._port: int = self._listener.getsockname()[1]
        self.names = {f"{host}:{self._port}" for host in ("127.0.0.1", "localhost")}
        self._closed = Event()
        self._pid = os.getpid()
        self._thread = Thread(target=self._accept, name="ingot-view", daemon=True)
        self._thread.start()

    @property
    def origin(self) -> str:
        """The server's origin: ``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """The address of the page. The token is in its fragment, which no request and no log contains."""
        return f"{self.origin}/#token={self.token}"

    def ticket(self) -> str:
        """Return an address that leads to the page once: for command lines, which other users can read."""
        self.tickets.add(ticket := f"/open/{secrets.token_urlsafe(24)}")
        return self.origin + ticket

    def close(self) -> None:
        """End the server and its connections. Answers in progress break off. May be called more than once."""
        if os.getpid() != self._pid:
            # A child of a fork has no thread of the server, and shares the sockets with the parent.
            self._listener.close()
            return
        self._closed.set()
        # A finalizer may run in any thread.
        if current_thread() is not self._thread:
            self._thread.join(_CLOSING)
        self.connections.close(_CLOSING)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # The client disconnected before it was accepted, or the process has no descriptors left.
                self._closed.wait(_POLL)
                continue
            self._begin(connection)
        # Copies of the socket in children of a fork stop listening too.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _begin(self, connection: socket.socket) -> None:
        if not self.connections.admit(connection):
            connection.close()
            return
        try:
            Thread(target=self._serve, args=(connection,), name="ingot-view-connection", daemon=True).start()
        except RuntimeError:
            # The system has no more threads.
            self.connections.leave(connection)

    def _serve(self, connection: socket.socket) -> None:
        # Clients disconnect at any time, and files fail in the middle of an answer.
        with suppress(OSError, SafetensorError):
            try:
                _Handler(connection, None, self)  # type: ignore[arg-type]
            finally:
                self.connections.leave(connection)


class _Connections:
    """The open connections, at most `most`.

    A new connection replaces the one that has been idle longest. A connection is busy only while it answers a
    request with the token, so connections without the token never keep others out.

    Sockets are closed under the lock. Otherwise `shutdown` in another thread could hit a reused descriptor.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Reentrant, since a finalizer that closes the server may run at any point.
        self._changed = Condition()
        self._is_open = True
        # In the order in which they became idle.
        self._idle: dict[socket.socket, None] = {}
        self._busy: set[socket.socket] = set()
        # Shut down, but their threads still run.
        self._ending: set[socket.socket] = set()

    def admit(self, connection: socket.socket) -> bool:
        """Add a connection and return True, or return False if there is no room."""
        with self._changed:
            if len(self._idle) + len(self._busy) >= self._most and self._idle:
                self._end(next(iter(self._idle)))
            is_full = len(self._idle) + len(self._busy) >= self._most or len(self._ending) >= self._most
            if not self._is_open or is_full:
                return False
            self._idle[connection] = None
            return True

    @contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """Keep a connection while it answers a request with the token."""
        with self._changed:
            if connection in self._ending:
                raise ConnectionAbortedError
            self._idle.pop(connection, None)
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._changed:
                if connection in self._busy:
                    self._busy.remove(connection)
                    self._idle[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Close and remove a connection whose thread ends."""
        with self._changed:
            self._idle.pop(connection, None)
            self._busy.discard(connection)
            self._ending.discard(connection)
            # The client sees the end even if a child of a fork has a copy of the socket.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Shut all connections down, and wait up to `timeout` seconds for their threads."""
        with self._changed:
            self._is_open = False
            for connection in (*self._idle, *self._busy):
                self._end(connection)
            self._changed.wait_for(lambda: not self._ending, timeout)

    def _end(self, connection: socket.socket) -> None:
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        self._ending.add(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ingot"
    sys_version = ""
    timeout = _PATIENCE
    disable_nagle_algorithm = True
    server: Server  # type: ignore[assignment]
    connection: socket.socket

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            # The body is not read, and would be taken for the next request.
            self.close_connection = True
        if len(self.headers) > _MOST_FIELDS:
            return self._refuse(431, "too many header fields")
        if self._only("Host") not in self.server.names:
            return self._refuse(421, "this server has another name")
        if self.path == "/":
            return self._give(report.page().encode(), "text/html; charset=utf-8")
        with suppress(KeyError):
            self.server.tickets.remove(self.path)
            return self._head(303, 0, {"Location": f"/#token={self.server.token}"})
        origins = self.headers.get_all("Origin", [])
        is_elsewhere = any(origin.removeprefix("http://") not in self.server.names for origin in origins)
        if is_elsewhere or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return self._refuse(403, "another site sent the request")
        given = (self._only("Authorization") or "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return self._refuse(401, "the token is missing or wrong")
        with self.server.connections.answering(self.connection):
            return self._answer_with_data()

    def _answer_with_data(self) -> None:
        number = re.fullmatch(r"/f/(\d{1,6})", self.path)
        shelf = self.server.shelf
        if self.path != "/files" and (number is None or int(number[1]) >= len(shelf.files)):
            return self._refuse(404, "no such file")
        with ExitStack() as stack:
            try:
                found = self._listed() if number is None else self._opened(int(number[1]), stack)
            except (OSError, SafetensorError) as fault:
                if isinstance(fault, SafetensorError):
                    return self._refuse(409, str(fault), fault.code)
                return self._refuse(503, str(fault))
            if isinstance(found, bytes):
                return self._give(found, "application/json")
            return self._give_range(found)

    def _listed(self) -> bytes:
        return json.dumps(self.server.shelf.listed()).encode()

    def _opened(self, number: int, stack: ExitStack) -> OpenFile:
        opening: AbstractContextManager[OpenFile] = self.server.shelf.files[number].open()
        return stack.enter_context(opening)

    def _only(self, field: str) -> str | None:
        """Return the value of a header field that the request has exactly once."""
        values = self.headers.get_all(field, [])
        return values[0] if len(values) == 1 else None

    def _give(self, body: bytes, kind: str) -> None:
        self._head(200, len(body), {"Content-Type": kind})
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, reason: str, code: str | None = None) -> None:
        """Answer with an error. The reader takes `code` and the reason from the header."""
        body = f"{reason}\n".encode(errors="backslashreplace")
        fields = {"Content-Type": "text/plain; charset=utf-8"}
        if code is not None:
            text = " ".join(reason.split())[:_MOST_REASON]
            fields |= {"X-Error-Code": code, "X-Error-Message": quote(text, safe=_PLAIN, errors="replace")}
        self._head(status, len(body), fields)
        if self.command == "GET":
            self.wfile.write(body)

    def _give_range(self, file: OpenFile) -> None:
        version, size = f'"{file.version}"', file.size
        fields = {"Content-Type": "application/octet-stream", "ETag": version, "Accept-Ranges": "bytes"}
        asked = self._only("Range")
        # An empty file has no range; browsers would log a refusal on the console of the page.
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

    def _body(self, file: OpenFile, begin: int, end: int, status: int, fields: dict[str, str]) -> None:
        is_empty = self.command == "HEAD" or begin == end
        try:
            send = None if is_empty else file.sender(begin, end)
        except SafetensorError as fault:
            return self._refuse(409, str(fault), fault.code)
        self._head(status, end - begin, fields)
        if send is None:
            return None
        # No other answer may follow one that broke off.
        self.close_connection, keep = True, self.close_connection
        self.close_connection = keep or send(self.connection) != end - begin
        return None

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
