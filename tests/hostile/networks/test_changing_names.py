"""Names whose addresses change between two lookups (threat N4), and lookups without an answer (N10).

Each test runs a nameserver in its own network namespace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

#: Runs in a network namespace. Its loopback device has 127.0.0.1, which is private, and a public address. The
#: name server answers the first lookup with the public address, and later ones with the private address.
SCRIPT = """
    import json, socket, socketserver, subprocess, sys, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    PUBLIC, PRIVATE, DATA = "93.184.216.34", "127.0.0.1", b"x" * (3 << 20)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "addr", "add", PUBLIC + "/32", "dev", "lo"], check=True)
    subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
    asked, served = [], {PUBLIC: 0, PRIVATE: 0}

    class Names(socketserver.BaseRequestHandler):
        def handle(self):
            query, socket = self.request
            end = query.index(0, 12) + 5
            is_v4 = query[end - 4 : end - 2] == bytes([0, 1])
            answer = b""
            if is_v4:
                address = PUBLIC if not asked else PRIVATE
                asked.append(address)
                parts = bytes(map(int, address.split(".")))
                answer = bytes([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]) + parts
            head = query[:2] + bytes([0x81, 0x80, 0, 1, 0, int(is_v4), 0, 0, 0, 0])
            socket.sendto(head + query[12:end] + answer, self.client_address)

    class Files(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            here = self.connection.getsockname()[0]
            served[here] += 1
            if self.headers["Host"].startswith(PRIVATE):
                self.send_response(302)
                self.send_header("Location", f"http://changing.test:{port}/x")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part = DATA[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(DATA)}")
            self.send_header("Content-Length", str(len(part)))
            # The next request makes a connection of its own, and asks for the name again.
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *arguments):
            pass

    names = socketserver.UDPServer(("127.0.0.1", 53), Names)
    threading.Thread(target=names.serve_forever, daemon=True).start()
    home = ThreadingHTTPServer((PRIVATE, 0), Files)
    port = home.server_port
    for server in (home, ThreadingHTTPServer((PUBLIC, port), Files)):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    import ingot
    try:
        # The caller may name a private host. Where that leads to may be none.
        ingot.hash(f"http://{PRIVATE}:{port}/x", storage_options={"retries": 0})
        code = "none"
    except ingot.StorageError as error:
        code = error.code
    print(json.dumps([code, asked, served]))
"""


def alone(tmp_path: Path, script: str, options: str) -> Any:
    """Return the output of `script` in a network of its own, with its own nameserver."""
    if not all(map(shutil.which, ("unshare", "ip", "mount"))):
        pytest.skip("unshare, ip or mount is not installed")
    apart = ["unshare", "--map-root-user", "--mount", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system gives no namespaces")
    (tmp_path / "resolv.conf").write_text(f"nameserver 127.0.0.1\noptions {options}\n")
    command = [*apart, sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "resolv.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_n4_changed_address_is_rejected(tmp_path: Path) -> None:
    code, asked, served = alone(tmp_path, SCRIPT, "timeout:1 attempts:1")
    # The client connected to the address that it had checked: the public one of the first lookup.
    assert asked[0] == "93.184.216.34"
    assert served["93.184.216.34"] == 1
    # The second lookup, for the rest of the file, leads to the private address, which receives no request.
    assert len(asked) > 1
    assert code == "redirect-refused"
    assert served["127.0.0.1"] == 1, "only what the caller has named"
