"""Servers that are slow, that stop, and that say to wait."""

from __future__ import annotations

import time

import pytest

from support.hostile_servers import DATA, opened, read_fails, refused
from support.servers import Handler, Request, serving


def test_n10_a_server_that_says_nothing_is_given_up() -> None:
    with serving(lambda handler, request: time.sleep(5)) as server:
        begun = time.monotonic()
        error = refused(server, "timed-out", retries=0)
        assert "the server sent nothing more" in str(error)
        assert time.monotonic() - begun < 4


def test_n10_a_body_that_stalls_or_trickles_is_given_up() -> None:
    for bit, said in ((b"", "the server sent nothing more"), (b"x", "too slowly")):

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
        assert "retry after" not in str(refused(server, "http-status", retries=0))


@pytest.mark.parametrize("wait", ["315360000", "99999999999999999999", "Thu, 31 Dec 2099 23:59:59 GMT"])
def test_n12_a_wait_of_years_is_an_error_at_once(wait: str) -> None:
    with serving(lambda handler, request: handler.head(503, Retry_After=wait, Content_Length=0)) as server:
        begun = time.monotonic()
        error = refused(server, "http-status", retries=10)
        assert "503" in str(error)
        assert "retry after" in str(error)
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
