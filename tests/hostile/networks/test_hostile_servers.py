"""Servers that answer with other bytes than were asked for."""

from __future__ import annotations

import gzip
import time

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.hostile_servers import DATA, TENSORS, after_the_header, opened, read_fails, refused
from support.servers import Handler, Request, good, serving, unused_port


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
        assert "requested bytes 0..131072" in str(error)
        assert server.sent < 100 << 20


def test_n5_a_whole_file_is_never_taken_for_a_part() -> None:
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
def test_n6_another_part_than_was_asked_for_is_refused(said: dict[str, object]) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.part(DATA, request, **{k: str(v).format(n=len(DATA)) for k, v in said.items()})

    with serving(answer) as server:
        error = refused(server, "wrong-range")
        assert "requested bytes 0..131072, received " in str(error)


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
        begin, end = request.range
        end = min(end, len(DATA))
        span = f"bytes {begin}-{end - 1}/{len(DATA)}"
        handler.head(206, Content_Range=span, Content_Length=end - begin, ETag='"v1"')
        handler.body(DATA[begin : end - 1])
        forged = (
            f"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/{len(DATA)}\r\nContent-Length: 10\r\n\r\n0123456789"
        )
        # Sent with the last byte. What came after the next request would be its answer, which is refused.
        handler.wfile.write(DATA[end - 1 : end] + forged.encode())
        handler.wfile.flush()

    with serving(answer) as server:
        file = opened(server)
        time.sleep(0.05)
        assert np.array_equal(file["a"], TENSORS["a"])


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
