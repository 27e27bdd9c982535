"""A server whose answers are random: correct, or wrong in a way that a client can detect.

It has two versions of each file, of equal size. It sends no undetectable lie: no other bytes with all headers
of the right ones, and no two versions with equal version headers. With any other lie, a client must get the
bytes of one version or an error.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

import ingot.numpy

from .servers import Handler, Request

#: Longer than the clients here wait.
STALL = 0.5
DATES = ["Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"]
TAGS = ['"one"', '"two"']
GARBAGE = [
    "",
    " ",
    "\x7f",
    "-1",
    "99999999999999999999999",
    "bytes",
    '"',
    "a, b",
    "ü",
    "x" * 2000,
    "bytes */*",
]


def _tensors(version: int) -> dict[str, np.ndarray]:
    return {
        "a": np.arange(120_000, dtype=np.uint32) * 2 + version,
        "b": np.arange(60_000, dtype=np.uint64).reshape(300, 200) * 2 + version,
        "c": np.full(7, version, np.float32),
    }


TENSORS = [_tensors(version) for version in range(2)]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def _files(version: int) -> dict[str, bytes]:
    tensors = TENSORS[version]
    # A header that takes a second request.
    files = {"m.safetensors": ingot.numpy.save(tensors, {"k": "AB"[version] * 150_000})}
    for shard, names in zip(SHARDS, (["a"], ["b", "c"]), strict=True):
        files[shard] = ingot.numpy.save({name: tensors[name] for name in names})
    places = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}
    size = sum(tensor.nbytes for tensor in tensors.values())
    files[INDEX] = json.dumps({"metadata": {"total_size": size}, "weight_map": places}).encode()
    return files


#: The files of each version.
FILES = [_files(version) for version in range(2)]


@dataclass
class Reply:
    """An answer before it is sent. Lies change it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    reason: str = "x"
    #: Raw bytes to send before and after it.
    before: bytes = b""
    after: bytes = b""
    #: The positions at which the answer ends and pauses, as fractions of its length.
    ends: float = 1
    waits: float | None = None
    resets: bool = False

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def drop(self, name: str) -> None:
        self.headers = [(key, value) for key, value in self.headers if key != name]

    def set(self, name: str, value: str) -> None:
        self.drop(name)
        self.headers.append((name, value))

    def rendered(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {self.reason}", *(f"{key}: {value}" for key, value in self.headers)]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
        return self.before + head + self.body + self.after


@dataclass
class Case:
    """The answers to one client. The seed and the number determine all of them."""

    seed: int
    number: int
    random: random.Random = field(init=False)
    lock: Lock = field(default_factory=Lock)
    #: The number of answers so far.
    answers: int = 0
    lies: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed}/{self.number}")
        #: The share of answers that are lies.
        self.share = self.random.choice([0, 0.05, 0.2, 0.2, 0.5, 0.9])
        #: The server's version headers, and the number of answers before it changes the version.
        self.says = self.random.choice([("ETag", "Last-Modified")] * 2 + [("ETag",), ("Last-Modified",), ()])
        moves = bool(self.says) and self.random.random() < 0.3
        self.moves_after = self.random.randrange(6) if moves else None

    def version(self) -> int:
        return int(self.moves_after is not None and self.answers > self.moves_after)


@dataclass(frozen=True)
class Asked:
    """The facts of a request that a lie may use."""

    case: Case
    request: Request
    name: str
    #: The address of the same file on the other server.
    elsewhere: str
    begin: int
    end: int
    data: bytes
    other: bytes

    @property
    def random(self) -> random.Random:
        return self.case.random


def truth(asked: Asked, version: int) -> Reply:
    data, begin = asked.data, asked.begin
    end = min(asked.end, len(data))
    if begin >= len(data):
        return Reply(416, [("Content-Range", f"bytes */{len(data)}"), ("Content-Length", "0")], b"")
    headers = [
        ("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}"),
        ("Content-Length", str(end - begin)),
    ]
    said = {"ETag": TAGS[version], "Last-Modified": DATES[version]}
    headers += [(name, said[name]) for name in asked.case.says]
    return Reply(206, headers, data[begin:end])


def secrets(request: Request) -> list[str]:
    """Return the secrets that the client sent."""
    sent = [request.headers.get(name, "") for name in ("authorization", "cookie", "x-api-key")]
    sent += [value.partition(" ")[2] for value in sent]
    sent.append(request.path.partition("?")[2])
    return [text for text in sent if text]


# Each lie changes a reply that is true.
Lie = Callable[[Reply, Asked], None]

VERSION_HEADERS = ("ETag", "Last-Modified")


def _header(reply: Reply, asked: Asked) -> str:
    """Return a header of the reply that a lie may change."""
    names = [name for name, _ in reply.headers]
    if asked.case.moves_after is not None:
        # Without headers for the first version, both versions could pass for one.
        names = [name for name in names if name not in VERSION_HEADERS] or names
    return asked.random.choice(names or ["ETag"])


def header_absent(reply: Reply, asked: Asked) -> None:
    reply.drop(_header(reply, asked))


def header_doubled(reply: Reply, asked: Asked) -> None:
    name = _header(reply, asked)
    value = asked.random.choice([reply.get(name) or "", *GARBAGE])
    reply.headers.insert(asked.random.randint(0, len(reply.headers)), (name, value))


def header_changed(reply: Reply, asked: Asked) -> None:
    name = _header(reply, asked)
    reply.set(name, asked.random.choice(GARBAGE))


def header_spelt_otherwise(reply: Reply, asked: Asked) -> None:
    name = _header(reply, asked)
    value = reply.get(name) or ""
    reply.drop(name)
    spelt = [
        name.upper(),
        name.lower(),
        f"{name} ",
        f" {name}",
        name.replace("-", "_"),
        f"{name}\t",
        f"{name}\0",
    ]
    reply.headers.append(
        (asked.random.choice(spelt), asked.random.choice([value, f" {value} ", f"\t{value}"]))
    )


def header_folded(reply: Reply, asked: Asked) -> None:
    reply.headers.append(("X-Folded", "a\r\n b"))


def range_changed(reply: Reply, asked: Asked) -> None:
    begin, end, size = asked.begin, asked.end, len(asked.data)
    says = [
        f"bytes {begin + 1}-{end}/{size}",
        f"bytes {begin}-{end}/{size}",
        f"bytes {begin}-{end - 2}/{size}",
        f"bytes {end - 1}-{begin}/{size}",
        f"items {begin}-{end - 1}/{size}",
        f"bytes {begin}-{end - 1}/*",
        f"bytes {begin}-{end - 1}",
    ]
    if begin:
        # Only later answers can contradict the length: the first one defines it.
        says += [f"bytes {begin}-{end - 1}/{size + 1}", f"bytes {begin}-{end - 1}/{end}"]
    reply.set("Content-Range", asked.random.choice(says))


def another_range(reply: Reply, asked: Asked) -> None:
    """Send bytes of another range with truthful headers."""
    shift = asked.random.choice([-asked.begin, -1, 1, 4096, 100_000])
    begin, end = max(0, asked.begin + shift), min(asked.end + shift, len(asked.data))
    if (begin, end) != (asked.begin, asked.end) and begin < end:
        reply.body = asked.data[begin:end]
        reply.set("Content-Range", f"bytes {begin}-{end - 1}/{len(asked.data)}")
        reply.set("Content-Length", str(end - begin))


def less_of_the_range(reply: Reply, asked: Asked) -> None:
    end = asked.random.randint(asked.begin + 1, max(min(asked.end, len(asked.data)), asked.begin + 1))
    reply.body = asked.data[asked.begin : end]
    reply.set("Content-Range", f"bytes {asked.begin}-{end - 1}/{len(asked.data)}")
    reply.set("Content-Length", str(len(reply.body)))


def length_changed(reply: Reply, asked: Asked) -> None:
    length = len(reply.body)
    says = [
        length - 1,
        length + 1,
        length // 2,
        0,
        f"+{length}",
        f"{length}, {length}",
        f"{length}.0",
        f"0x{length:x}",
    ]
    reply.set("Content-Length", str(asked.random.choice(says)))


def body_short(reply: Reply, asked: Asked) -> None:
    reply.body = reply.body[: asked.random.randrange(len(reply.body) or 1)]


def body_long(reply: Reply, asked: Asked) -> None:
    if asked.random.random() < 0.5:
        reply.drop("Content-Length")
    reply.after = bytes(asked.random.choice([1, 1000, 300_000]))


def another_answer_behind_it(reply: Reply, asked: Asked) -> None:
    """Send additional bytes, which a client might take for the answer to its next request."""
    version = asked.case.version()
    twin = truth(asked, version)
    twin.body = bytes(len(twin.body))
    # Only its range or its version distinguishes it from a true answer.
    twin.set("Content-Range", f"bytes 1-{len(twin.body)}/{len(asked.data)}")
    reply.after = twin.rendered()


def slow(reply: Reply, asked: Asked) -> None:
    reply.waits = asked.random.random()


def broken_off(reply: Reply, asked: Asked) -> None:
    reply.ends = asked.random.random()
    reply.resets = asked.random.random() < 0.5


def compressed(reply: Reply, asked: Asked) -> None:
    reply.body = gzip.compress(reply.body, 1)
    reply.set("Content-Length", str(len(reply.body)))
    for coding in asked.random.choice(
        [["gzip"], ["identity", "gzip"], ["GZIP"], ["gzip, identity"], ["x-gzip"]]
    ):
        reply.headers.append(("Content-Encoding", coding))


def called_compressed(reply: Reply, asked: Asked) -> None:
    reply.headers.append(
        ("Content-Encoding", asked.random.choice(["gzip", "br", "identity", "", "x", "gzip, gzip"]))
    )


def whole_file(reply: Reply, asked: Asked) -> None:
    reply.status, reply.body = 200, asked.data
    reply.drop("Content-Range")
    reply.set("Content-Length", str(len(reply.body)))


def parts(reply: Reply, asked: Asked) -> None:
    part = f"--x\r\nContent-Range: {reply.get('Content-Range')}\r\n\r\n".encode()
    reply.body = part + reply.body + b"\r\n--x--\r\n"
    reply.set("Content-Length", str(len(reply.body)))
    reply.set("Content-Type", "multipart/byteranges; boundary=x")


def chunked(reply: Reply, asked: Asked) -> None:
    """Send the body in chunks, correct or malformed."""
    size = f"{len(reply.body):x}"
    size = asked.random.choice(
        [size, size.upper(), f"{size};x=y", "ffffffffffffffff", "10000000000000000", f"-{size}", ""]
    )
    ending = asked.random.choice([b"0\r\n\r\n", b"0\r\nETag: x\r\n\r\n", b"", b"0\r\n", b"0\n\n"])
    reply.body = size.encode() + b"\r\n" + reply.body + b"\r\n" + ending
    if asked.random.random() < 0.8:
        reply.drop("Content-Length")
    reply.headers.append(
        ("Transfer-Encoding", asked.random.choice(["chunked", "chunked", "identity", "gzip, chunked"]))
    )


def another_status(reply: Reply, asked: Asked) -> None:
    statuses = [
        100,
        101,
        199,
        201,
        204,
        205,
        207,
        226,
        300,
        304,
        400,
        401,
        403,
        404,
        408,
        409,
        410,
        412,
        416,
        418,
    ]
    reply.status = asked.random.choice([*statuses, 425, 429, 451, 500, 502, 503, 504, 507, 599, 0, 99, 1000])
    if asked.random.random() < 0.3:
        waits = ["0", "1", "315360000", "soon", "-1", "Thu, 31 Dec 2099 23:59:59 GMT"]
        reply.headers.append(("Retry-After", asked.random.choice(waits)))


def redirected(reply: Reply, asked: Asked) -> None:
    here, query = asked.request.path.partition("?")[0], asked.request.path.partition("?")[2]
    places = [
        f"{asked.elsewhere}{here}",
        f"{asked.elsewhere}{here}",
        f"{asked.elsewhere}{here}?Signature=of-the-server",
        f"{asked.elsewhere.replace('//', '//u:p@')}{here}",
        here,
        f"{here}?{query}",
        "../" + here.rpartition("/")[2],
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http://127.0.0.1:1/",
        "//127.0.0.2:1/",
        "http://",
        "",
        f"data:text/plain,{query}",
        f"javascript:{query}",
        "http://[::1/",
        "\x01",
    ]
    reply.status, reply.body = asked.random.choice([301, 302, 303, 307, 308]), b""
    reply.set("Content-Length", "0")
    for _ in range(asked.random.choice([1, 1, 1, 1, 0, 2])):
        reply.headers.append(("Location", asked.random.choice(places)))


def told_again(reply: Reply, asked: Asked) -> None:
    """Repeat the request in the parts of an answer that a client may print."""
    said = asked.random.choice(secrets(asked.request) or ["nothing"])
    said = asked.random.choice(
        [said, said.upper(), f"bad token {said}!", base64.b64encode(said.encode()).decode()]
    )
    status = asked.random.choice([400, 401, 403, 404, 500, 206, 302])
    way = asked.random.choice(
        ["X-Error-Message", "WWW-Authenticate", "Content-Range", "ETag", "reason", "body", "Location"]
    )
    if way == "ETag" and asked.case.moves_after is not None:
        way = "X-Error-Message"
    reply.status = status
    if way == "reason":
        reply.reason = said
    elif way == "body":
        reply.body = json.dumps({"error": said}).encode()
        reply.set("Content-Length", str(len(reply.body)))
        reply.set("Content-Type", "application/json")
    elif way == "Location":
        reply.status = 302
        reply.set("Location", f"ftp://{said}/")
    else:
        reply.set(way, said)


def no_head(reply: Reply, asked: Asked) -> None:
    heads = [
        b"",
        b"\0" * 100,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/0.9 206 x\r\n\r\n",
        b"HTTP/1.1 206",
    ]
    heads += [
        b"HTTP/1.1 206 x\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 206 x\r\n" + b"X: y\r\n" * 12_000 + b"\r\n",
    ]
    heads += [
        b"HTTP/1.1 206x y\r\n\r\n",
        b"HTTP/1.1 2 06 x\r\n\r\n",
        b"\r\n" * 100,
        b"HTTP/1.1 100 x\r\n\r\n" * 500,
    ]
    reply.before = asked.random.choice(heads)


def interim(reply: Reply, asked: Asked) -> None:
    """Send an interim answer first, as servers may."""
    reply.before = b"HTTP/1.1 103 Early Hints\r\nETag: x\r\n\r\n"


def refused_by_condition(reply: Reply, asked: Asked) -> None:
    reply.status, reply.body = 412, b""
    reply.set("Content-Length", "0")


LIES: list[Lie] = [
    header_absent,
    header_doubled,
    header_changed,
    header_spelt_otherwise,
    header_folded,
    range_changed,
    another_range,
    less_of_the_range,
    length_changed,
    body_short,
    body_long,
    another_answer_behind_it,
    broken_off,
    compressed,
    called_compressed,
    whole_file,
    parts,
    chunked,
    another_status,
    redirected,
    redirected,
    told_again,
    no_head,
    interim,
    refused_by_condition,
]
#: The lies that make a client wait.
SLOW = 0.02


def reply_to(case: Case, request: Request, elsewhere: str) -> Reply:
    """Return the next answer of a case."""
    name = request.path.partition("?")[0].rpartition("/")[2]
    with case.lock:
        version = case.version()
        case.answers += 1
        data, other = (files.get(name) for files in (FILES[version], FILES[1 - version]))
        if data is None or other is None:
            return Reply(404, [("Content-Length", "0")], b"")
        if "range" in request.headers:
            begin, end = request.range
        else:
            begin, end = 0, len(data)
        asked = Asked(case, request, name, elsewhere, begin, end, data, other)
        reply = truth(asked, version)
        if case.random.random() < case.share:
            lie = slow if case.random.random() < SLOW else case.random.choice(LIES)
            case.lies.append(lie.__name__)
            lie(reply, asked)
        return reply


def send(reply: Reply, handler: Handler) -> None:
    data = reply.rendered()
    data = data[: int(len(data) * reply.ends)]
    handler.close_connection = reply.ends < 1 or reply.before != b"" or reply.get("Content-Length") is None
    if reply.waits is not None:
        begun = int(len(data) * reply.waits)
        handler.wfile.write(data[:begun])
        handler.wfile.flush()
        time.sleep(STALL)
        data = data[begun:]
    handler.wfile.write(data)
    handler.wfile.flush()
    if reply.resets:
        # Closing sends a reset, not an end.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
