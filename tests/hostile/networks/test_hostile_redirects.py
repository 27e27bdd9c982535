"""Servers that lead elsewhere: redirects, schemes, private addresses, proxies, and what is secret."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.hostile_servers import DATA, QUICK, TENSORS, TOKEN, opened, refused
from support.servers import Answer, Handler, Request, Server, good, serving, unused_port


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    """Another server, which has the file too."""
    with serving(good(DATA), host="127.0.0.2") as server:
        yield server


def redirecting(to: str, status: int = 302) -> Answer:
    return lambda handler, request: handler.head(status, Location=to, Content_Length=0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_n1_no_secret_follows_a_redirect_to_another_host(elsewhere: Server, status: int) -> None:
    with serving(redirecting(elsewhere.url(), status)) as server:
        file = opened(server, headers={"Cookie": "c", "X-Api-Key": "k"}, allow_private_redirects=True)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
        assert elsewhere.requests
        for request in elsewhere.requests:
            assert (
                not {"authorization", "cookie", "x-api-key", "proxy-authorization"} & request.headers.keys()
            )


def test_n1_a_secret_that_was_dropped_does_not_come_back(elsewhere: Server) -> None:
    def answer(handler: Handler, request: Request) -> None:
        if request.path == "/m.safetensors":
            handler.head(302, Location=elsewhere.url("/hop"), Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        home = server.url("/back")
        with serving(redirecting(home), host="127.0.0.3") as hop:

            def through(handler: Handler, request: Request) -> None:
                handler.head(302, Location=hop.url() if request.path == "/m.safetensors" else home)

            with serving(redirecting(hop.url())) as first:
                file = opened(first, allow_private_redirects=True)
                assert np.array_equal(file["b"], TENSORS["b"])
                assert "authorization" in first.requests[0].headers
                back = [request for request in server.requests if request.path == "/back"]
                assert back
                assert all("authorization" not in request.headers for request in hop.requests + back)


def test_n1_another_port_is_another_host() -> None:
    with serving(good(DATA)) as other, serving(redirecting(other.url())) as server:
        opened(server, allow_private_redirects=True)
        assert "authorization" not in other.requests[0].headers


def test_n1_a_redirect_on_the_same_host_keeps_the_token() -> None:
    def answer(handler: Handler, request: Request) -> None:
        if request.path.startswith("/m"):
            handler.head(307, Location="/renamed?x=1", Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        file = opened(server)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in server.requests)
        # Where it led to is asked from then on.
        assert [request.path for request in server.requests].count("/m.safetensors") == 1


def test_n1_redirects_without_end_are_given_up() -> None:
    with serving(redirecting("/m.safetensors")) as server:
        refused(server, "too-many-redirects")
        assert len(server.requests) == 6


@pytest.mark.parametrize(
    "to",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "gopher://127.0.0.1/x",
        "data:text/plain,hello",
        "javascript:1",
    ],
)
def test_n2_other_schemes_are_refused(to: str) -> None:
    with serving(redirecting(to)) as server:
        error = refused(server, "redirect-refused")
        assert to.partition(":")[0] in str(error)
        assert "passwd" not in str(error)


def test_n3_a_redirect_into_a_private_network_is_refused(elsewhere: Server) -> None:
    for to in (
        elsewhere.url(),
        f"http://localhost:{elsewhere.port}/x",
        f"http://[::ffff:127.0.0.2]:{elsewhere.port}/x",
        f"http://2130706434:{elsewhere.port}/x",
        f"http://[::1]:{elsewhere.port}/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/x",
        "http://[2001:0:7f00:1::]/x",
        "http://[100::1]/x",
        "http://[3fff::1]/x",
        "http://[5f00::1]/x",
        "http://[::ffff:0:7f00:1]/x",
        "http://[fe80::1]/x",
    ):
        with serving(redirecting(to)) as server:
            error = refused(server, "redirect-refused")
            # An address of IPv6 stands in brackets, so that the port can be told.
            assert urlsplit(to).netloc in str(error)
    assert elsewhere.requests == []


def test_n3_behind_a_proxy_no_address_is_private_by_its_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("2130706433", "0x7f.1", "127.1", "[::1]", "localhost"):
        with serving(redirecting(f"http://{host}:1/x")) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url(""))
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.delenv(name, raising=False)
            with pytest.raises(ingot.StorageError) as caught:
                ingot.safe_open("http://model.example/m.safetensors", "np")
            assert caught.value.code == "redirect-refused"
            assert len(proxy.requests) == 1


def test_n3_what_the_caller_names_may_be_private(elsewhere: Server) -> None:
    assert len(opened(elsewhere)) == 2


def test_n4_what_is_checked_is_the_address_that_is_connected_to() -> None:
    # The name is public to nobody who looks it up once more: it is looked up once, where it is connected to.
    with serving(good(DATA)) as other, serving(redirecting(f"http://localhost:{other.port}/x")) as server:
        refused(server, "redirect-refused")
        assert other.requests == []


def test_n14_no_secret_stands_in_an_error(elsewhere: Server) -> None:
    signed = elsewhere.url("/cdn?X-Amz-Signature=hf_secret")

    def gone(handler: Handler, request: Request) -> None:
        handler.head(500, Content_Length=0)

    with serving(gone, host="127.0.0.3") as cdn, serving(redirecting(cdn.url("/x?sig=hf_secret"))) as server:
        error = refused(server, "http-status", allow_private_redirects=True)
        assert f"(from {cdn.url('/x')}?…)" in str(error)
    for url in (signed, signed.replace("//", "//me:hf_secret@")):
        with pytest.raises(ingot.HeaderError) as caught, serving(good(b"nothing")) as server:
            ingot.safe_open(url.replace(elsewhere.url("")[7:], server.url("")[7:]), "np")
        assert "hf_secret" not in str(caught.value)
        assert "hf_secret" not in caught.value.path
        assert "hf_secret" not in repr(caught.value.__dict__)


@pytest.mark.parametrize(
    "url",
    [
        "http://h/a\r\nX-Injected: 1",
        "http://h/a b",
        "http://user:hf_secret@",
        "http://h\x00/",
        "http://h\\@other/",
        "http://h:99999/x",
        "http://bücher.example/x",
        "https://[::1/x",
        "hf://owner",
        "hf://owner/repo/../../x",
        "s3://bucket",
        "s3:///key",
    ],
)
def test_n16_what_is_no_url_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ingot.OptionError) as caught:
        ingot.safe_open(url, "np")
    assert caught.value.code == "bad-url"
    assert "hf_secret" not in str(caught.value)
    assert "\r" not in str(caught.value)


def test_n16_a_path_is_asked_for_as_it_was_given() -> None:
    with serving(good(DATA)) as server:
        opened(server, "/a/../b%2Fc//d%20e")
        assert server.requests[0].path == "/a/../b%2Fc//d%20e"


def test_n17_a_proxy_is_used_and_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(good(DATA)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url("").replace("//", "//proxy:pw@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        url = "http://model.example/m.safetensors"
        assert len(ingot.safe_open(url, "np")) == 2
        asked = proxy.requests[0]
        assert asked.path == url
        assert asked.headers["host"] == "model.example"
        assert asked.headers["proxy-authorization"] == "Basic cHJveHk6cHc="
        # Over http:// the proxy would read what is meant for the other.
        with pytest.raises(ingot.OptionError, match="a proxy would read the credentials"):
            ingot.safe_open(url, "np", storage_options={"token": TOKEN})
        assert len(proxy.requests) == 1


def words_of_no_proxy(server: Server) -> list[str]:
    """What may stand in `no_proxy`, of a server and of others."""
    port, other = server.port, unused_port()
    hosts = ["127.0.0.1", "127.0.0.2", "localhost", ".localhost", "LOCALHOST", "0.0.1", "example.com"]
    networks = ["127.0.0.0/8", "127.0.0.0/24", "127.0.0.1/32", "10.0.0.0/8", "128.0.0.0/1", "127.0.0.0/33"]
    ports = [f"{host}:{port}" for host in hosts[:4]] + [f"{host}:{other}" for host in hosts[:4]]
    return ["", "*", "example.com,127.0.0.1", *hosts, *networks, *ports]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_n17_no_proxy_is_read_as_others_read_it(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """What one of requests, urllib and curl knows is known, and nothing that none of them knows."""
    requests_of_python = pytest.importorskip("requests", reason="requests is not installed")
    curl = shutil.which("curl")
    with serving(good(DATA)) as proxy, serving(good(DATA)) as server:
        url = f"http://{host}:{server.port}/m.safetensors"
        monkeypatch.setenv("http_proxy", proxy.url(""))
        for name in ("NO_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for word in words_of_no_proxy(server):
            monkeypatch.setenv("no_proxy", word)
            before = len(proxy.requests)
            ingot.safe_open(url, "np")
            is_direct = len(proxy.requests) == before
            says = {"requests": requests_of_python.utils.should_bypass_proxies(url, no_proxy=None)}
            if curl is not None:
                before = len(proxy.requests)
                subprocess.run([curl, "-s", "-o", os.devnull, "-r", "0-9", url], check=True, timeout=60)
                says["curl"] = len(proxy.requests) == before
            if "/" in word or ":" in word:
                # Old versions of curl know no networks, urllib knows none, and of ports each knows others.
                says["urllib"] = proxy_bypass_environment(f"{host}:{server.port}") is True
                assert is_direct in says.values(), (word, says)
                assert is_direct or not (says["requests"] or says["urllib"]), (word, says)
            elif word == "0.0.1":
                # requests compares how texts end, which makes a domain of half of an address.
                assert not is_direct
            else:
                assert set(says.values()) == {is_direct}, (word, says)


def test_n17_through_a_tunnel_only_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler, request: handler.head(403, Content_Length=0)) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url("").replace("//", "//proxy:pw@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(PermissionError, match="answer of the proxy"):
            ingot.safe_open("https://model.example/m", "np", storage_options=QUICK)
        assert proxy.requests[0].path == "model.example:443"
        assert "authorization" not in proxy.requests[0].headers
        assert proxy.requests[0].headers["proxy-authorization"].startswith("Basic ")
