"""Proxies of every kind (threat N17): each serves the same file, and gets the same requests as from curl."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.proxies import Certificate, Proxy, certificate, proxying
from support.servers import Answer, Server, good, serving

DATA = ingot.numpy.save({"a": np.arange(600_000), "b": np.arange(7, dtype=np.float32)})
KINDS = ["http", "https"]
#: No pauses that a test would wait for.
QUICK = {"retries": 1, "min_rate": 1000, "timeout": 60}


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("cert"))


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serving(good(DATA)) as server:
        yield server


@pytest.fixture(scope="module")
def safe(cert: Certificate) -> Iterator[Server]:
    with serving(good(DATA), tls=cert.context) as server:
        yield server


@dataclass
class Way:
    """A URL, and the variable that sets its proxy."""

    url: str
    variable: str


def ways(plain: Server, safe: Server, host: str) -> list[Way]:
    return [
        Way(f"http://{host}:{plain.port}/m.safetensors", "http_proxy"),
        Way(f"https://{host}:{safe.port}/m.safetensors", "https_proxy"),
    ]


def curl(url: str, proxy: str, cert: Certificate, *more: str) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [program, "-sS", "-r", f"0-{len(DATA) - 1}", "--max-time", "60", "--proxy", proxy]
    command += ["--cacert", cert.path, "--proxy-cacert", cert.path, *more, url]
    return subprocess.run(command, capture_output=True, check=False, timeout=90)


def redirecting(to: str) -> Answer:
    return lambda handler, request: handler.head(302, Location=to, Content_Length=0)


def fails(url: str, code: str, **options: object) -> ingot.StorageError:
    with pytest.raises(ingot.StorageError) as caught:
        ingot.safe_open(url, "np", storage_options={**QUICK, **options})
    assert caught.value.code == code, caught.value
    assert "hunter2" not in f"{caught.value!r} {caught.value}"
    return caught.value


@pytest.mark.parametrize("user", [None, "me:hunter2", "m%40e:p%3Ass%2f%C3%BC", "me:"])
@pytest.mark.parametrize("kind", KINDS)
def test_n17_proxies_see_what_curl_shows_them(
    monkeypatch: pytest.MonkeyPatch,
    cert: Certificate,
    plain: Server,
    safe: Server,
    kind: str,
    user: str | None,
) -> None:
    hosts = ["127.0.0.1", "localhost", "model.example"]
    for way in [way for host in hosts for way in ways(plain, safe, host)]:
        with proxying(kind, user=user, tls=cert.context) as proxy:
            monkeypatch.setenv(way.variable, proxy.url())
            loaded = ingot.numpy.load_file(way.url, storage_options={"ca_file": str(cert.path)})
            assert loaded["a"].tobytes() == np.arange(600_000).tobytes()
            monkeypatch.delenv(way.variable)
            ours, proxy.asked = set(proxy.asked), []
            theirs = curl(way.url, proxy.url(), cert)
            assert theirs.stdout == DATA, theirs.stderr
            # A name with two addresses is requested by its IPv6 address too, which has no listener.
            assert set(proxy.asked) <= ours
            assert ours - set(proxy.asked) <= {("address", "::1", plain.port), ("address", "::1", safe.port)}
            assert {kind for kind, *_ in ours} == ({"address"} if way.url.find("//1") > 0 else {"name"})
            # A tunnel shows the proxy the host and nothing of the request.
            if way.variable == "https_proxy":
                assert all(head.startswith(b"CONNECT ") for head in proxy.heads)
                assert not any(b"m.safetensors" in head for head in proxy.heads)


@pytest.mark.parametrize("kind", KINDS)
def test_n17_refusing_proxy_is_asked_once_and_named(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, safe: Server, kind: str
) -> None:
    url = safe.url().replace("http:", "https:")
    with proxying(kind, user="me:other", tls=cert.context) as proxy:
        for user in ("me:hunter2", "hunter2:hunter2", ""):
            monkeypatch.setenv("https_proxy", proxy.url(user))
            before = proxy.connections
            error = fails(url, "http-status", ca_file=str(cert.path))
            assert proxy.url("") in str(error)
            assert proxy.connections == before + 1
            assert curl(url, proxy.url(user), cert).returncode != 0
        assert proxy.asked == []


def test_n17_untrusted_proxy_is_refused(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, plain: Server
) -> None:
    # A certificate that is not trusted, and a trusted one for another address.
    for host, trusted in [("127.0.0.1", {}), ("127.0.0.2", {"ca_file": str(cert.path)})]:
        with proxying("https", host=host, user="me:hunter2", tls=cert.context) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url())
            assert proxy.url("") in str(fails(plain.url(), "tls", **trusted))
            assert proxy.heads == []


@pytest.mark.parametrize("kind", KINDS)
def test_n17_credentials_are_not_sent_through_a_reading_proxy(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, plain: Server, kind: str
) -> None:
    with proxying(kind, tls=cert.context) as proxy:
        monkeypatch.setenv("all_proxy", proxy.url())
        with pytest.raises(ingot.OptionError, match="a proxy would read the credentials"):
            ingot.safe_open(plain.url(), "np", storage_options={"token": "hunter2"})
        assert proxy.asked == []


@pytest.mark.parametrize("kind", KINDS)
def test_n3_proxied_redirect_into_a_private_network_is_rejected(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, plain: Server, kind: str
) -> None:
    for to in ("127.0.0.1", "[::1]", "localhost", "169.254.169.254", "2130706433"):
        location = f"http://{to}:{plain.port + 1}/x"
        with serving(redirecting(location)) as server, proxying(kind, tls=cert.context) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url())
            fails(server.url(), "redirect-refused", ca_file=str(cert.path))
            # The proxy received only the target that the caller has named.
            assert [asked[1:] for asked in proxy.asked] == [("127.0.0.1", server.port)]


@pytest.mark.parametrize("kind", ["socks5", "socks5h", "socks4", "ftp"])
def test_n17_unknown_kind_of_proxy_is_refused(
    monkeypatch: pytest.MonkeyPatch, plain: Server, kind: str
) -> None:
    with proxying("http", user="me:hunter2") as proxy:
        monkeypatch.setenv("all_proxy", proxy.url().replace("http:", f"{kind}:"))
        with pytest.raises(ingot.OptionError, match="SOCKS: name another one") as caught:
            ingot.safe_open(plain.url(), "np", storage_options=QUICK)
        assert "hunter2" not in f"{caught.value!r} {caught.value}"
        assert proxy.connections == 0
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert len(ingot.safe_open(plain.url(), "np")) == 2


#: Codes of malformed answers of a proxy, and of malformed TLS after them.
NONSENSE = ("http-status", "malformed-response", "connection-broken", "tls")


def conversations() -> Iterator[bytes]:
    """Yield answers to `CONNECT`: correct bytes with one fault, and random bytes."""
    right = b"HTTP/1.1 200 Go on\r\n\r\n"
    draw = random.Random(0)
    for end in range(len(right)):
        yield right[:end]
        yield right[:end] + bytes([right[end] ^ (1 << draw.randrange(8))]) + right[end + 1 :]
    yield bytes([5, 0, 5, 0, 0, 1, 127, 0, 0, 1, 0, 9])
    # Bytes after the answer, as from a server that sends first.
    yield right + DATA[:100]
    for _ in range(20):
        yield draw.randbytes(draw.randrange(40))


def test_n17_proxy_with_an_invalid_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = {"retries": 0, "timeout": 60}
    for said in conversations():

        def say(peer: socket.socket, said: bytes = said) -> None:
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 10):
                pass

        with proxying("http", instead=say) as proxy:
            monkeypatch.setenv("all_proxy", proxy.url())
            with pytest.raises(ingot.StorageError) as caught:
                ingot.safe_open("https://model.example/m", "np", storage_options=patient)
            assert caught.value.code in NONSENSE, (said, caught.value)


def test_n17_proxy_may_answer_bytewise(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, safe: Server
) -> None:
    class Slowly:
        """A socket that sends one byte at a time."""

        def __init__(self, peer: socket.socket) -> None:
            self.peer = peer
            self.recv, self.fileno = peer.recv, peer.fileno

        def sendall(self, data: bytes) -> None:
            for at in range(min(len(data), 40)):
                self.peer.sendall(data[at : at + 1])
                time.sleep(0.001)
            self.peer.sendall(data[40:])

    from support import proxies

    asked = Proxy("http", "127.0.0.1", user="me:pw")
    with proxying("http", instead=lambda peer: proxies.http(asked, Slowly(peer))) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url("me:pw"))
        url = f"https://model.example:{safe.port}/m.safetensors"
        assert len(ingot.safe_open(url, "np", storage_options={"ca_file": str(cert.path)})) == 2
        assert asked.asked[0] == ("name", "model.example", safe.port)


@pytest.mark.parametrize("kind", KINDS)
def test_n17_no_proxy_applies_to_every_kind(
    monkeypatch: pytest.MonkeyPatch, cert: Certificate, plain: Server, kind: str
) -> None:
    with proxying(kind, tls=cert.context) as proxy:
        for word, is_direct in [
            ("127.0.0.0/8", True),
            ("127.0.0.1", True),
            ("*", True),
            ("128.0.0.0/8", False),
        ]:
            monkeypatch.setenv("all_proxy", proxy.url())
            monkeypatch.setenv("no_proxy", word)
            before = proxy.connections
            ingot.safe_open(plain.url(), "np", storage_options={"ca_file": str(cert.path)})
            assert (proxy.connections == before) == is_direct, word
