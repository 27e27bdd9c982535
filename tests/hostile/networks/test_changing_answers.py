"""Headers of answers that are present, absent, repeated, or changed between two answers.

A server has two versions of a file, of one size. The headers of an answer may be in any of these states, and
the bytes may be of the other version or of another range. A reader returns the
first version or raises an error, and never mixes versions.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Handler, Request, Server, serving

pytestmark = pytest.mark.slow

NODE = shutil.which("node")
#: Both versions. Opening one takes two requests, since its header is long, and reading its tensors a third.
FILES = [
    ingot.numpy.save({"a": np.full(300_000, number, "<i2")}, {"k": letter * 200_000})
    for number, letter in enumerate("AB")
]
SIZE = len(FILES[0])
#: No retries and no waits.
OPTIONS = {"retries": 0, "stall_timeout": 5, "timeout": 20, "token": False}

Headers = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Answer:
    """The headers of a server: these replace its own, repeated as often as they are listed."""

    headers: Headers = field(default_factory=dict)
    #: `own`: bytes of the opened version. `other`: bytes of the other version. `packed`: compressed bytes.
    body: str = "own"
    status: int = 206


@dataclass(frozen=True)
class Case:
    first: Answer
    later: Answer
    #: Whether the file must be read, not rejected.
    is_good: bool = False


def bytes_of(answer: Answer, begin: int, end: int) -> bytes:
    if answer.status == 200:
        begin, end = 0, SIZE
    if answer.body == "packed":
        return bytes(byte ^ 0xFF for byte in FILES[0][begin:end])
    return FILES[answer.body == "other"][begin:end]


def send(answer: Answer, handler: Handler, request: Request) -> None:
    begin, end = request.range[0], min(request.range[1], SIZE)
    body = bytes_of(answer, begin, end)
    usual = {"Content-Length": (str(len(body)),), "Connection": ("close",)}
    if answer.status == 206:
        usual["Content-Range"] = ("bytes {begin}-{last}/{size}",)
    lines = [f"HTTP/1.1 {answer.status} x"]
    places = {
        "begin": begin,
        "next": begin + 1,
        "last": end - 1,
        "size": SIZE,
        "n": len(body),
        "less": len(body) - 1,
    }
    for name, values in {**usual, **answer.headers}.items():
        lines += [f"{name}: {value.format(**places)}" for value in values]
    handler.raw("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


@pytest.fixture
def answering() -> Iterator[tuple[list[Case], Server]]:
    """Yield a list of cases and a server. The path of a request is the number of a case."""
    cases: list[Case] = []

    def answer(handler: Handler, request: Request) -> None:
        case = cases[int(request.path.split("/")[1])]
        send(case.first if request.range[0] == 0 else case.later, handler, request)

    with serving(answer) as server:
        yield cases, server


def read(url: str) -> str:
    """Return the letters of the bytes read, or nothing if reading failed."""
    try:
        with ingot.safe_open(url, "np", storage_options=OPTIONS) as file:
            said = set(file.metadata()["k"])
            said |= {"AB"[number] if number in (0, 1) else "?" for number in np.unique(file["a"])}
    except (ingot.SafetensorError, OSError):
        return ""
    return "".join(sorted(said))


def read_by_node(urls: list[str]) -> list[str]:
    script = Path(__file__).with_name("reading.mjs")
    run = subprocess.run(
        [str(NODE), script], input=json.dumps(urls), capture_output=True, text=True, check=True, timeout=250
    )
    verdicts = json.loads(run.stdout)
    # A code is a word: anything else is a failure of the reader itself.
    odd = [verdict for verdict in verdicts if isinstance(verdict, dict) and " " in verdict["code"]]
    assert not odd, odd
    return ["" if isinstance(verdict, dict) else verdict for verdict in verdicts]


READERS = [
    "native",
    pytest.param("javascript", marks=pytest.mark.skipif(NODE is None, reason="node is not installed")),
]


def check(answering: tuple[list[Case], Server], cases: list[Case], reader: str) -> None:
    known, server = answering
    known[:] = cases
    urls = [server.url(f"/{number}/m.safetensors") for number in range(len(cases))]
    verdicts = [read(url) for url in urls] if reader == "native" else read_by_node(urls)
    for case, verdict in zip(cases, verdicts, strict=True):
        assert verdict in ("", "A"), case
        assert verdict == "A" or not case.is_good, case
    assert any(case.is_good for case in cases)


DATES = ["Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"]
WEAK = ("ETag", ('W/"weak"',))


def said(values: list[str], number: int) -> list[tuple[str, ...]]:
    """Return the version headers for this number: none, one or two equal ones, or both versions."""
    own, other = values[number], values[1 - number]
    return [(), (own,), (own, own), (own, other), (other, own)]


def versions(number: int) -> list[Headers]:
    tags = [
        *said(['"one"', '"two"'], number),
        *said(["one", "two"], number)[1:2],
        WEAK[1],
        ('"\xfe"', '"\xff"'),
    ]
    return [{"ETag": tag, "Last-Modified": date} for tag, date in product(tags, said(DATES, number))]


def cases_of_versions(body: str) -> Iterator[Case]:
    """All version headers of the first answer and of the later ones."""
    for first, later in product(versions(0), versions(1 if body == "other" else 0)):
        # A client cannot detect other bytes if the version headers are equal or absent.
        if body == "other" and said_alike(first, later):
            continue
        is_plain = all(len(set(values)) < 2 for values in first.values())
        yield Case(Answer(first), Answer(later, body), is_good=body == "own" and is_plain and first == later)


def said_alike(one: Headers, other: Headers) -> bool:
    return one == other and all(len(set(values)) < 2 for values in one.values())


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("body", ["own", "other"])
def test_handles_mix_no_versions(answering: tuple[list[Case], Server], body: str, reader: str) -> None:
    cases = list(cases_of_versions(body))
    assert len(cases) > 1000
    known = [Case(Answer({"ETag": ('"one"',)}), Answer({"ETag": ('"one"',)}), is_good=True)]
    # Only a part of the cases: all of them combine the same few dozen version headers.
    check(answering, known + cases[:: 1 if reader == "native" else 3], reader)


RIGHT = "bytes {begin}-{last}/{size}"
WRONG = "bytes {next}-{last}/{size}"
PARTS = "multipart/byteranges; boundary=x"
ENCODED = [
    *[("gzip",), ("identity", "gzip"), ("gzip", "identity"), ("identity, gzip",), ("", "br"), ("x-gzip",)],
    *[("identity", "identity", "zstd"), ("GZIP",), ("identity,", ",deflate")],
]
#: Headers of one answer, and whether its bytes must be accepted.
#: How answers are delimited is tried in crates/remote/tests/answers.rs.
ODD: list[tuple[Headers, str, bool]] = [
    *[({"Content-Encoding": own}, "own", True) for own in [("identity",), ("identity",) * 2, ("Identity",)]],
    *[({"Content-Encoding": packed}, "packed", False) for packed in ENCODED],
    *[
        ({"Content-Range": wrong}, "packed", False)
        for wrong in [(), (WRONG,), (RIGHT, WRONG), (WRONG, RIGHT)]
    ],
    ({"Content-Range": (RIGHT, RIGHT)}, "own", False),
    *[
        ({"Content-Type": kind}, "packed", False)
        for kind in [(PARTS,), ("text/plain", PARTS), (PARTS, "text/plain")]
    ],
    ({"Content-Type": ("text/plain", "application/octet-stream")}, "own", True),
]


def cases_of_one_answer() -> Iterator[Case]:
    tag = {"ETag": ('"one"',)}
    plain = Answer(tag)
    for headers, body, is_good in ODD:
        odd = Answer({**tag, **headers}, body)
        for first, later in [(odd, plain), (plain, odd), (odd, odd)]:
            yield Case(first, later, is_good)
    for body in ("own", "other", "packed"):
        yield Case(plain, Answer(tag, body, status=200))


@pytest.mark.parametrize("reader", READERS)
def test_handles_compare_doubled_headers(answering: tuple[list[Case], Server], reader: str) -> None:
    cases = list(cases_of_one_answer())
    check(answering, cases, reader)


def test_download_mixes_no_versions(answering: tuple[list[Case], Server], tmp_path: Path) -> None:
    known, server = answering
    tag, date = {"ETag": ('"one"',)}, {"Last-Modified": (DATES[0],)}
    known[:] = [
        *[Case(Answer(first), Answer(first), is_good=True) for first in (tag, date, {**tag, **date}, {})],
        *[Case(Answer(tag), Answer(later, "other")) for later in ({}, date, {"ETag": ('"one"', '"two"')})],
        *[Case(Answer(date), Answer(later, "other")) for later in ({}, tag, {"Last-Modified": tuple(DATES)})],
        *[Case(Answer({}), Answer(later, "other")) for later in (tag, date)],
        *[
            Case(Answer(tag), Answer({**tag, **headers}, body))
            for headers, body, _ in ODD
            if body == "packed"
        ],
    ]
    for number, case in enumerate(known):
        url, path = server.url(f"/{number}/m.safetensors"), tmp_path / f"{number}.safetensors"
        if case.is_good:
            ingot.download(url, path, storage_options=OPTIONS)
            assert path.read_bytes() == FILES[0]
        else:
            with pytest.raises((ingot.SafetensorError, OSError)):
                ingot.download(url, path, storage_options=OPTIONS)
            assert not path.exists()


def test_handles_reject_a_redirect_with_two_locations() -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.raw(b"HTTP/1.1 302 x\r\nLocation: /a\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n")

    with serving(answer) as server:
        with pytest.raises(ingot.StorageError, match="its location occurs twice") as caught:
            ingot.safe_open(server.url(), "np", storage_options=OPTIONS)
        assert caught.value.code == "malformed-response"
        assert len(server.requests) == 1
