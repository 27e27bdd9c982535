"""Servers that answer with other bytes than requested, that stall, and that redirect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.errors import raises
from support.hostile_servers import DATA, QUICK, TENSORS, TOKEN, after_the_header, opened, read_fails, refused
from support.servers import Answer, Handler, Request, Server, good, serving, unused_port


def test_n5_small_file_may_come_whole() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(DATA))
        handler.body(DATA)

    with serving(answer) as server:
        file = opened(server)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert len(server.requests) == 1


@pytest.mark.parametrize("with_length", [True, False])
def test_n5_large_file_may_not_come_whole(with_length: bool) -> None:
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
        assert "requested bytes 0..131072" in str(error)
        assert server.sent < 100 << 20


def test_n5_whole_file_is_no_part() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(DATA), ETag='"v1"')
        handler.body(DATA)

    read_fails(answer, "range-ignored")


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
def test_n6_wrong_part_is_rejected(said: dict[str, object]) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.part(DATA, request, **{k: str(v).format(n=len(DATA)) for k, v in said.items()})

    with serving(answer) as server:
        error = refused(server, "wrong-range")
        assert "requested bytes 0..131072, received " in str(error)


def test_n6_part_without_a_range_is_rejected() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(206, Content_Length=131072)
        handler.body(DATA[:131072])

    with serving(answer) as server:
        refused(server, "wrong-range")


def test_n6_two_ranges_are_rejected() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.send_response(206)
        for first in (0, 1):
            handler.send_header("Content-Range", f"bytes {first}-131071/{len(DATA)}")
        handler.end_headers()

    with serving(answer) as server:
        refused(server, "malformed-response")


def test_n7_truncated_body_is_resumed() -> None:
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


def test_n7_repeatedly_truncated_body_is_an_error() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        handler.close_connection = True
        said = {"Content_Range": f"bytes {begin}-{end - 1}/{len(DATA)}", "ETag": '"v1"'}
        handler.head(206, Content_Length=end - begin, **said)

    error, _ = read_fails(answer, "short-read", retries=2)
    assert ", 3 times" in str(error)
    assert error.tensor == "a"
    assert "found 0" in str(error)


def test_n7_endless_body_is_read_no_further_than_requested() -> None:
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


def test_n7_bytes_after_an_answer_are_ignored() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        end = min(end, len(DATA))
        span = f"bytes {begin}-{end - 1}/{len(DATA)}"
        handler.head(206, Content_Range=span, Content_Length=end - begin, ETag='"v1"')
        handler.body(DATA[begin : end - 1])
        forged = (
            f"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/{len(DATA)}\r\nContent-Length: 10\r\n\r\n0123456789"
        )
        # Sent with the last byte. If the client kept these bytes, they would be the answer to its next
        # request.
        handler.wfile.write(DATA[end - 1 : end] + forged.encode())
        handler.wfile.flush()

    with serving(answer) as server:
        file = opened(server)
        time.sleep(0.05)
        assert np.array_equal(file["a"], TENSORS["a"])


def test_n9_parts_are_requested_of_one_version() -> None:
    with serving(good(DATA)) as server:
        opened(server)["a"]
        assert "if-match" not in server.requests[0].headers
        assert {request.headers.get("if-match") for request in server.requests[1:]} == {'"v1"'}


@pytest.mark.parametrize("way", ["412", "etag", "size", "gone short"])
def test_n9_another_version_is_rejected(way: str) -> None:
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

    with serving(answer) as server, raises(ingot.StorageError, "open it again", code="changed"):
        opened(server)["a"]


def test_n19_valid_chunks_are_read() -> None:
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


def test_missing_host_is_named() -> None:
    port = unused_port()
    with raises(ingot.StorageError, code="unreachable") as caught:
        ingot.safe_open(f"http://127.0.0.1:{port}/x", "np", storage_options={"retries": 1})
    assert f"cannot connect to 127.0.0.1:{port}" in str(caught.value)
    with pytest.raises(ingot.StorageError, match=rf"cannot connect to \[::1\]:{port}"):
        ingot.safe_open(f"http://[::1]:{port}/x", "np", storage_options={"retries": 0})
    assert ", 2 times" in str(caught.value)


def test_n10_stalled_body_times_out() -> None:
    # A busy machine may send no bit for a while.
    for bit, patience, said in ((b"", 0.6, "the server sent nothing more"), (b"x", 2, "too slowly")):

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

        error, _ = read_fails(answer, "timed-out", retries=0, stall_timeout=patience)
        assert said in str(error)


def test_n10_trickling_head_times_out() -> None:
    def answer(handler: Handler, request: Request) -> None:
        for letter in b"HTTP/1.1 206 Partial Content\r\nX: " + b"y" * 200:
            handler.raw(bytes([letter]))
            time.sleep(0.02)

    with serving(answer) as server:
        refused(server, "timed-out", retries=0, stall_timeout=0.6)


@pytest.mark.parametrize("wait", ["", " ", "soon", "-1", "1.5"])
def test_n12_invalid_retry_after_is_ignored(wait: str) -> None:
    answered: list[str] = []

    def answer(handler: Handler, request: Request) -> None:
        answered.append(wait)
        if len(answered) == 1:
            handler.head(503, Retry_After=wait, Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        assert len(opened(server)) == 2
    with serving(lambda handler, request: handler.head(503, Retry_After=wait, Content_Length=0)) as server:
        assert "retry after" not in str(refused(server, "http-status", retries=0))


def test_n10_total_time_of_attempts_is_bounded() -> None:
    with serving(lambda handler, request: time.sleep(3)) as server:
        begun = time.monotonic()
        refused(server, "timed-out", retries=100, timeout=1, stall_timeout=5)
        # A hundred attempts would take minutes.
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_n12_transient_failure_is_retried(status: int) -> None:
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


def test_n12_retry_after_is_kept() -> None:
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


@pytest.mark.parametrize("wait", ["315360000", "99999999999999999999", "Thu, 31 Dec 2099 23:59:59 GMT"])
def test_n12_retry_after_of_years_is_an_error(wait: str) -> None:
    with serving(lambda handler, request: handler.head(503, Retry_After=wait, Content_Length=0)) as server:
        begun = time.monotonic()
        error = refused(server, "http-status", retries=10)
        assert "503" in str(error)
        assert "retry after" in str(error)
        assert len(server.requests) == 1
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, FileNotFoundError), (410, FileNotFoundError), (401, PermissionError), (403, PermissionError)],
)
def test_n12_permanent_failure_is_not_retried(status: int, kind: type[OSError]) -> None:
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


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    """Run another server with the same file."""
    with serving(good(DATA), host="127.0.0.2") as server:
        yield server


def redirecting(to: str, status: int = 302) -> Answer:
    return lambda handler, request: handler.head(status, Location=to, Content_Length=0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_n1_secret_is_not_sent_to_another_host(elsewhere: Server, status: int) -> None:
    with serving(redirecting(elsewhere.url(), status)) as server:
        file = opened(server, headers={"Cookie": "c", "X-Api-Key": "k"}, allow_private_redirects=True)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
        assert elsewhere.requests
        for request in elsewhere.requests:
            assert (
                not {"authorization", "cookie", "x-api-key", "proxy-authorization"} & request.headers.keys()
            )


def test_n1_dropped_secret_does_not_come_back(elsewhere: Server) -> None:
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


def test_n1_redirect_on_the_same_host_keeps_the_token() -> None:
    def answer(handler: Handler, request: Request) -> None:
        if request.path.startswith("/m"):
            handler.head(307, Location="/renamed?x=1", Content_Length=0)
        else:
            handler.part(DATA, request)

    with serving(answer) as server:
        file = opened(server)
        assert np.array_equal(file["a"], TENSORS["a"])
        assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in server.requests)
        # Later requests go to its target.
        assert [request.path for request in server.requests].count("/m.safetensors") == 1


def test_n1_endless_redirects_are_an_error() -> None:
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
def test_n2_other_schemes_are_rejected(to: str) -> None:
    with serving(redirecting(to)) as server:
        error = refused(server, "redirect-refused")
        assert to.partition(":")[0] in str(error)
        assert "passwd" not in str(error)


def test_n3_redirect_into_a_private_network_is_rejected(elsewhere: Server) -> None:
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
            # An IPv6 address is in brackets, which separate it from the port.
            assert urlsplit(to).netloc in str(error)
    assert elsewhere.requests == []


def test_n3_private_names_pass_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("2130706433", "0x7f.1", "127.1", "[::1]", "localhost"):
        with serving(redirecting(f"http://{host}:1/x")) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url(""))
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.delenv(name, raising=False)
            with raises(ingot.StorageError, code="redirect-refused"):
                ingot.safe_open("http://model.example/m.safetensors", "np")
            assert len(proxy.requests) == 1


def test_n17_tunnel_shows_only_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler, request: handler.head(403, Content_Length=0)) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url("").replace("//", "//proxy:pw@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(PermissionError, match="answer of the proxy"):
            ingot.safe_open("https://model.example/m", "np", storage_options=QUICK)
        assert proxy.requests[0].path == "model.example:443"
        assert "authorization" not in proxy.requests[0].headers
        assert proxy.requests[0].headers["proxy-authorization"].startswith("Basic ")


def test_n3_private_address_of_the_caller_is_allowed(elsewhere: Server) -> None:
    assert len(opened(elsewhere)) == 2


def test_n4_connected_address_is_the_checked_one() -> None:
    # A second lookup would return another address. The name is resolved once, for the connection.
    with serving(good(DATA)) as other, serving(redirecting(f"http://localhost:{other.port}/x")) as server:
        refused(server, "redirect-refused")
        assert other.requests == []


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
def test_n16_invalid_url_is_rejected_before_a_request(url: str) -> None:
    with raises(ingot.OptionError, code="bad-url") as caught:
        ingot.safe_open(url, "np")
    assert "hf_secret" not in str(caught.value)
    assert "\r" not in str(caught.value)


def test_n16_path_is_requested_as_given() -> None:
    with serving(good(DATA)) as server:
        opened(server, "/a/../b%2Fc//d%20e")
        assert server.requests[0].path == "/a/../b%2Fc//d%20e"
