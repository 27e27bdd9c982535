"""What servers may do to us, row by row (threats N): one clear error, and never a wrong byte."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment

import numpy as np
import pytest

import ingot
import ingot.numpy

from .servers import Answer, Handler, Request, Server, good, serving, unused_port

TENSORS = {"a": np.arange(600_000), "b": np.arange(7, dtype=np.float32)}
DATA = ingot.numpy.save(TENSORS)
TOKEN = "hf_secret"
#: No pauses that a test would wait for, and a server that stalls is soon given up.
QUICK = {"retries": 1, "stall_timeout": 0.6, "min_rate": 1000, "timeout": 10, "token": TOKEN}


def opened(server: Server, path: str = "/m.safetensors", **options: object) -> ingot.safe_open:
    return ingot.safe_open(server.url(path), "np", storage_options={**QUICK, **options})


def refused(server: Server, code: str, path: str = "/m.safetensors", **options: object) -> ingot.StorageError:
    """Opening fails like this; the message names the URL and no secret."""
    with pytest.raises(ingot.StorageError) as caught:
        opened(server, path, **options)
    assert caught.value.code == code, caught.value
    assert str(caught.value).startswith(server.url(path).partition("?")[0])
    assert TOKEN not in str(caught.value)
    return caught.value


def after_the_header(then: Answer) -> Answer:
    """A server that turns bad once the file is open."""

    def answer(handler: Handler, request: Request) -> None:
        if request.range[0] == 0:
            handler.part(DATA, request, ETag='"v1"')
        else:
            then(handler, request)

    return answer


def read_fails(answer: Answer, code: str, **options: object) -> tuple[ingot.StorageError, Server]:
    """Reading a tensor fails like this."""
    with serving(after_the_header(answer)) as server:
        file = opened(server, **options)
        with pytest.raises(ingot.StorageError) as caught:
            file["a"]
    assert caught.value.code == code, caught.value
    assert caught.value.path == server.url("/m.safetensors")
    return caught.value, server


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    """Another server, which has the file too."""
    with serving(good(DATA), host="127.0.0.2") as server:
        yield server


def redirecting(to: str, status: int = 302) -> Answer:
    return lambda handler, request: handler.head(status, Location=to, Content_Length=0)


# N1: redirects and what is secret


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


# N2: schemes


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


# N3 and N4: addresses of private networks


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


# N5: Range ignored


def test_n5_a_small_file_may_come_whole() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(DATA))
        handler.body(DATA)

    with serving(answer) as server:
        file = opened(server)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert len(server.requests) == 1


@pytest.mark.parametrize("with_length", [True, False])
def test_n5_a_large_file_may_not(with_length: bool) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.close_connection = True
        if with_length:
            handler.head(200, Content_Length=1 << 40)
        else:
            handler.head(200)
        for _ in range(100):
            handler.body(bytes(1 << 20))

    with serving(answer) as server:
        error = refused(server, "range-ignored")
        assert "asked for bytes 0..131072" in str(error)
        assert server.sent < 100 << 20


def test_n5_a_whole_file_is_never_taken_for_a_part() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(DATA), ETag='"v1"')
        handler.body(DATA)

    read_fails(answer, "range-ignored")


# N6: another part than was asked for


@pytest.mark.parametrize(
    "said",
    [
        {"Content_Range": "bytes 0-9/{n}", "Content_Length": 10},
        {"Content_Range": "bytes 1-131072/{n}"},
        {"Content_Range": "bytes 0-131071/*"},
        {"Content_Range": "bytes 0-131071/100"},
        {"Content_Range": "bytes 5-4/{n}"},
        {"Content_Range": "items 0-131071/{n}"},
        {"Content_Range": "bytes 0-131071/18446744073709551616"},
        {"Content_Range": "bytes -0-131071/{n}"},
        {"Content_Range": "nonsense"},
        {"Content_Length": 5},
        {"Content_Type": "multipart/byteranges; boundary=x"},
    ],
    ids=str,
)
def test_n6_another_part_than_was_asked_for_is_refused(said: dict[str, object]) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.part(DATA, request, **{k: str(v).format(n=len(DATA)) for k, v in said.items()})

    with serving(answer) as server:
        error = refused(server, "wrong-range")
        assert "asked for bytes 0..131072, got " in str(error)


def test_n6_a_part_without_its_place_is_refused() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(206, Content_Length=131072)
        handler.body(DATA[:131072])

    with serving(answer) as server:
        refused(server, "wrong-range")


def test_n6_two_places_are_refused() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.send_response(206)
        for first in (0, 1):
            handler.send_header("Content-Range", f"bytes {first}-131071/{len(DATA)}")
        handler.end_headers()

    with serving(answer) as server:
        refused(server, "malformed-response")


# N7: other lengths than promised


def test_n7_a_body_that_breaks_off_is_asked_for_again_from_there() -> None:
    broken = []

    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        if len(broken) < 2:
            broken.append(request.range)
            handler.close_connection = True
            handler.head(
                206,
                Content_Range=f"bytes {begin}-{end - 1}/{len(DATA)}",
                Content_Length=end - begin,
                ETag='"v1"',
            )
            handler.body(DATA[begin : begin + 1000])
        else:
            handler.part(DATA, request, ETag='"v1"')

    with serving(after_the_header(answer)) as server:
        file = opened(server, retries=4)
        assert np.array_equal(file["a"], TENSORS["a"])
        asked = [request.range for request in server.requests]
        assert all((begin + 1000, end) in asked for begin, end in broken)


def test_n7_a_body_that_goes_on_breaking_off_is_an_error() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        handler.close_connection = True
        said = {"Content_Range": f"bytes {begin}-{end - 1}/{len(DATA)}", "ETag": '"v1"'}
        handler.head(206, Content_Length=end - begin, **said)

    error, _ = read_fails(answer, "short-read", retries=2)
    assert ", 3 times" in str(error)
    assert error.tensor == "a"
    assert "found 0" in str(error)


def test_n7_a_body_without_end_is_read_no_further_than_asked() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        handler.close_connection = True
        handler.head(206, Content_Range=f"bytes {begin}-{min(end, len(DATA)) - 1}/{len(DATA)}")
        handler.body(DATA[begin:end])
        for _ in range(1000):
            handler.body(b"x" * 65536)

    with serving(answer) as server:
        assert np.array_equal(opened(server)["a"], TENSORS["a"])
        assert server.sent < 64 << 20


def test_n7_bytes_after_an_answer_are_not_the_next_one() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.part(DATA, request, ETag='"v1"')
        forged = (
            f"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/{len(DATA)}\r\nContent-Length: 10\r\n\r\n0123456789"
        )
        handler.wfile.write(forged.encode())
        handler.wfile.flush()

    with serving(answer) as server:
        file = opened(server)
        time.sleep(0.05)
        assert np.array_equal(file["a"], TENSORS["a"])


# N8: content encodings


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_n8_encoded_bytes_are_refused(encoding: str) -> None:
    packed = gzip.compress(DATA[:4000])

    def answer(handler: Handler, request: Request) -> None:
        handler.head(
            206,
            Content_Encoding=encoding,
            Content_Range=f"bytes 0-{len(packed) - 1}/{len(packed)}",
            Content_Length=len(packed),
        )
        handler.body(packed)

    with serving(answer) as server:
        assert encoding in str(refused(server, "content-encoded"))
        assert server.requests[0].headers["accept-encoding"] == "identity"


# N9: another version


def test_n9_every_part_is_asked_for_of_one_version() -> None:
    with serving(good(DATA)) as server:
        opened(server)["a"]
        assert "if-match" not in server.requests[0].headers
        assert {request.headers.get("if-match") for request in server.requests[1:]} == {'"v1"'}


@pytest.mark.parametrize("way", ["412", "etag", "size", "gone short"])
def test_n9_another_version_is_never_mixed_in(way: str) -> None:
    other = DATA + bytes(5)

    def answer(handler: Handler, request: Request) -> None:
        if way == "412":
            handler.head(412, Content_Length=0)
        elif way == "etag":
            handler.part(bytes(len(DATA)), request, ETag='"v2"')
        elif way == "size":
            handler.part(other, request)
        else:
            handler.head(416, Content_Range="bytes */17", Content_Length=0)

    error, _ = read_fails(answer, "changed")
    if way == "size":
        assert (error.expected, error.found) == (len(DATA), len(other))
    if way == "gone short":
        assert error.found == 17


def test_n9_weak_tags_pin_by_date_and_size() -> None:
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    with serving(good(DATA, ETag='W/"1"', Last_Modified=date)) as server:
        opened(server)["a"]
        later = server.requests[1].headers
        assert "if-match" not in later
        assert later["if-unmodified-since"] == date

    def answer(handler: Handler, request: Request) -> None:
        begins = request.range[0] == 0
        handler.part(
            DATA, request, ETag='W/"1"', Last_Modified=date if begins else date.replace("2015", "2016")
        )

    with serving(answer) as server, pytest.raises(ingot.StorageError, match="open it again") as caught:
        opened(server)["a"]
    assert caught.value.code == "changed"


# N10: slow servers, huge heads


def test_n10_a_server_that_says_nothing_is_given_up() -> None:
    with serving(lambda handler, request: time.sleep(5)) as server:
        begun = time.monotonic()
        error = refused(server, "timed-out", retries=0)
        assert "nothing more came" in str(error)
        assert time.monotonic() - begun < 4


def test_n10_a_body_that_stalls_or_trickles_is_given_up() -> None:
    for bit, said in ((b"", "nothing more came"), (b"x", "too slowly")):

        def answer(handler: Handler, request: Request, bit: bytes = bit) -> None:
            begin, end = request.range
            handler.head(
                206,
                Content_Range=f"bytes {begin}-{end - 1}/{len(DATA)}",
                Content_Length=end - begin,
                ETag='"v1"',
            )
            handler.wfile.flush()
            for _ in range(100):
                time.sleep(0.05)
                handler.body(bit)

        error, _ = read_fails(answer, "timed-out", retries=0)
        assert said in str(error)


def test_n10_a_head_that_trickles_is_given_up() -> None:
    def answer(handler: Handler, request: Request) -> None:
        for letter in b"HTTP/1.1 206 Partial Content\r\nX: " + b"y" * 200:
            handler.raw(bytes([letter]))
            time.sleep(0.02)

    with serving(answer) as server:
        refused(server, "timed-out", retries=0)


def test_n10_the_time_for_all_attempts_is_bounded() -> None:
    with serving(lambda handler, request: time.sleep(3)) as server:
        begun = time.monotonic()
        refused(server, "timed-out", retries=100, timeout=1, stall_timeout=5)
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 206 x\r\nX: " + b"y" * (1 << 20),
        b"HTTP/1.1 206 x\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 206 x\r\nX y: z\r\n\r\n",
        b"HTTP/1.1 404 x\r\nX-Error-Message: \x1b[2J\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["long", "many", "bad", "escape", "another protocol", "tls"],
)
def test_n10_a_head_that_is_none_is_refused(head: bytes) -> None:
    with serving(lambda handler, request: handler.raw(head)) as server:
        refused(server, "malformed-response")


# N11: headers of files


@pytest.mark.parametrize("nbytes", [8 << 40, (1 << 64) - 1, 25_000_001])
def test_n11_the_header_is_not_fetched_because_a_file_says_so(nbytes: int) -> None:
    data = nbytes.to_bytes(8, "little") + b"{" + b" " * 200_000

    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        handler.head(206, Content_Range=f"bytes {begin}-{end - 1}/{9 << 40}", Content_Length=end - begin)
        handler.body(data[begin:end])

    with serving(answer) as server:
        with pytest.raises(ingot.HeaderError) as caught:
            opened(server)
        assert caught.value.path == server.url("/m.safetensors")
        assert len(server.requests) == 1


# N12: being told to wait


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_n12_what_may_pass_is_tried_again(status: int) -> None:
    told: list[int] = []

    def answer(handler: Handler, request: Request) -> None:
        if not told:
            told.append(status)
            handler.head(status, Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        assert len(opened(server)) == 2
        assert len(server.requests) == 2


def test_n12_a_wait_is_kept() -> None:
    times = []

    def answer(handler: Handler, request: Request) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            handler.head(503, Retry_After=1, Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        opened(server)
    assert times[1] - times[0] >= 1


@pytest.mark.parametrize("wait", ["", " ", "soon", "-1", "1.5"])
def test_n12_a_wait_that_is_none_is_none(wait: str) -> None:
    told: list[str] = []

    def answer(handler: Handler, request: Request) -> None:
        told.append(wait)
        if len(told) == 1:
            handler.head(503, Retry_After=wait, Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        assert len(opened(server)) == 2
    with serving(lambda handler, request: handler.head(503, Retry_After=wait, Content_Length=0)) as server:
        assert "to be asked again" not in str(refused(server, "http-status", retries=0))


@pytest.mark.parametrize("wait", ["315360000", "99999999999999999999", "Thu, 31 Dec 2099 23:59:59 GMT"])
def test_n12_a_wait_of_years_is_an_error_at_once(wait: str) -> None:
    with serving(lambda handler, request: handler.head(503, Retry_After=wait, Content_Length=0)) as server:
        begun = time.monotonic()
        error = refused(server, "http-status", retries=10)
        assert "503" in str(error)
        assert "to be asked again in" in str(error)
        assert len(server.requests) == 1
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, FileNotFoundError), (410, FileNotFoundError), (401, PermissionError), (403, PermissionError)],
)
def test_n12_what_will_not_pass_is_not_tried_again(status: int, kind: type[OSError]) -> None:
    said = "Repository not found"
    with serving(
        lambda handler, request: handler.head(status, X_Error_Message=said, Content_Length=0)
    ) as server:
        with pytest.raises(kind) as caught:
            opened(server)
        assert str(status) in str(caught.value)
        assert "not found" in str(caught.value)
        assert caught.value.filename == server.url("/m.safetensors")
        assert len(server.requests) == 1


# N14 and N16: what is shown, what is a URL


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


# N17: proxies


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
        with pytest.raises(PermissionError, match="the proxy says so"):
            ingot.safe_open("https://model.example/m", "np", storage_options=QUICK)
        assert proxy.requests[0].path == "model.example:443"
        assert "authorization" not in proxy.requests[0].headers
        assert proxy.requests[0].headers["proxy-authorization"].startswith("Basic ")


# N19: two ends of one body


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\nabcde",
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabcde",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 10000,
        b"Transfer-Encoding: gzip\r\n\r\nabcde",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    ],
)
def test_n19_a_body_with_two_ends_or_none_is_refused(rest: bytes) -> None:
    head = f"HTTP/1.1 206 x\r\nContent-Range: bytes 0-131071/{len(DATA)}\r\n".encode()
    with serving(lambda handler, request: handler.raw(head + rest)) as server:
        refused(server, "malformed-response")


def test_n19_proper_chunks_are_read() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        end = min(end, len(DATA))
        handler.head(206, Content_Range=f"bytes {begin}-{end - 1}/{len(DATA)}", Transfer_Encoding="chunked")
        for at in range(begin, end, 50_000):
            chunk = DATA[at : min(at + 50_000, end)]
            handler.body(b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk))
        handler.body(b"0\r\nTrailer: x\r\n\r\n")

    with serving(answer) as server:
        assert np.array_equal(opened(server)["a"], TENSORS["a"])


# What is no model


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>Sign in</html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "LFS"),
    ],
)
def test_pages_and_pointers_are_recognised(content: bytes, said: str) -> None:
    with serving(good(content)) as server, pytest.raises(ingot.HeaderError, match=said):
        opened(server)


def test_a_host_that_is_not_there_is_named() -> None:
    port = unused_port()
    with pytest.raises(ingot.StorageError) as caught:
        ingot.safe_open(f"http://127.0.0.1:{port}/x", "np", storage_options={"retries": 1})
    assert caught.value.code == "unreachable"
    assert f"cannot connect to 127.0.0.1:{port}" in str(caught.value)
    with pytest.raises(ingot.StorageError, match=rf"cannot connect to \[::1\]:{port}"):
        ingot.safe_open(f"http://[::1]:{port}/x", "np", storage_options={"retries": 0})
    assert ", 2 times" in str(caught.value)
