"""Strict models of S3, its dialects and Azure: the writes that each store accepts, and their results."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .clouds import Refused, signer
from .servers import Handler, Request, Server, serving

MIB = 1 << 20
LEAST_PART, MOST_PARTS = 5 * MIB, 10_000
# Quotes are escaped in the lists of S3.
_QUOTES = {'"': "&quot;"}
KEY, SECRET = "AKIDOFTHETESTS", "secret/of+the/tests"


@dataclass(frozen=True)
class Rules:
    """How a store differs from Amazon's."""

    #: All parts except the last have one size, which the last does not exceed.
    equal_parts: bool = False
    #: Whether a PUT, and the completion of an upload in parts, obey ``If-None-Match``.
    put_is_conditional: bool = True
    completion_is_conditional: bool = True
    #: It knows checksums beside signatures.
    has_checksums: bool = True


STORES = {
    "s3": Rules(),
    "r2": Rules(equal_parts=True),
    "without checksums": Rules(has_checksums=False),
    "unconditional": Rules(put_is_conditional=False, completion_is_conditional=False),
    "unconditional parts": Rules(completion_is_conditional=False),
}


class Answered(Exception):
    """An error of the store: the status and the code."""


@dataclass
class Part:
    data: bytes
    tag: str
    checksum: str | None


@dataclass
class Parts:
    """An object whose parts are sent."""

    path: str
    metadata: dict[str, str]
    algorithm: str | None
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass
class Stored:
    data: bytes
    metadata: dict[str, str]
    modified: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True)
class Outcome:
    """The answer to a request."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """What happens to the request of this kind and number, and to `count` requests of the kind in all."""

    kind: str
    number: int
    how: str
    count: int = 1


#: Kinds of requests, and what may happen to them.
KINDS = ("put", "begin", "part", "complete", "head", "abort", "list")
FAULTS = (
    "refused",
    "throttled",
    "failed",
    "failed in 200",
    "cut before",
    "cut after",
    "failed after",
    "failed in 200 after",
    "twice",
    "replaced before",
    "conflict",
    "conflict after",
)


@dataclass
class Store:
    rules: Rules = STORES["s3"]
    #: Requests are signed with the key of the tests.
    is_signed: bool = True
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Parts] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    #: The kinds of all requests, in order.
    asked: list[str] = field(default_factory=list)
    #: The most objects in an answer to a list request.
    page: int = 1000
    #: Requests whose fault is "late": they are not answered, and are carried out by `carry_out`.
    late: list[tuple[str, Request, bytes]] = field(default_factory=list)
    #: The most requests that were answered at once.
    most: int = 0
    server: Server = field(default_factory=lambda: Server(0))
    #: Called with each request before it is answered.
    watch: Callable[[str], None] = lambda kind: None
    _active: int = 0
    _begun: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def options(self) -> dict[str, object]:
        keys = {"access_key_id": KEY, "secret_access_key": SECRET} if self.is_signed else {"anonymous": True}
        return {"endpoint": self.server.url(""), "region": "eu-west-1", **keys}

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a program reaches the store."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        return {"AWS_ENDPOINT_URL": self.server.url(""), "AWS_REGION": "eu-west-1", **keys}

    def data(self, path: str) -> bytes | None:
        """Return the bytes that readers of a path see."""
        found = self.objects.get(path)
        return found and found.data

    def answer(self, handler: Handler, request: Request) -> None:
        with self._lock:
            self._active += 1
            self.most = max(self.most, self._active)
        try:
            self._answer(handler, request)
        finally:
            with self._lock:
                self._active -= 1

    def _answer(self, handler: Handler, request: Request) -> None:
        expected = int(request.headers.get("content-length", 0))
        body = handler.rfile.read(expected)
        if len(body) < expected:
            # The client was killed.
            handler.close_connection = True
            return
        kind = self._kind(handler.command, request)
        with self._lock:
            number = self.asked.count(kind)
            self.asked.append(kind)
            due = [
                one
                for one in self.faults
                if one.kind == kind and one.number <= number < one.number + one.count
            ]
        self.watch(kind)
        how = due[0].how if due else ""
        outcome: Outcome | None
        if how in ("cut before", "late"):
            outcome = None
            if how == "late":
                self.late.append((handler.command, request, body))
        elif how in FAILURES:
            outcome = FAILURES[how]
            if how == "conflict without parts":
                self.uploads.clear()
        else:
            if how == "replaced before":
                path = unquote(urlsplit(request.path).path)
                self.objects[path] = Stored(b"of another writer", {})
            outcome = self._outcome(handler.command, kind, request, body)
            if how == "twice":
                outcome = self._outcome(handler.command, kind, request, body)
            elif how.endswith(" after"):
                outcome = FAILURES.get(how.removesuffix(" after"))
        if outcome is None:
            handler.close_connection = True
            return
        handler.send_response(outcome.status)
        for name, value in {"Content-Length": str(len(outcome.body)), **outcome.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.body(outcome.body)

    def carry_out(self, method: str, request: Request, body: bytes) -> None:
        """Carry out a request whose sender waits no longer."""
        self._outcome(method, self._kind(method, request), request, body)

    def _kind(self, method: str, request: Request) -> str:
        query = dict(parse_qsl(urlsplit(request.path).query, keep_blank_values=True))
        if method == "POST":
            return "begin" if "uploads" in query else "complete"
        if method == "DELETE":
            return "abort" if "uploadId" in query else "delete"
        if method == "PUT":
            return "part" if "uploadId" in query else "put"
        return "list" if "list-type" in query else method.lower()

    def _outcome(self, method: str, kind: str, request: Request, body: bytes) -> Outcome:
        try:
            self._check(method, request, body)
            with self._lock:
                return getattr(self, f"_{kind}")(request, body)
        except Refused as why:
            return failure(403, "SignatureDoesNotMatch", str(why))
        except Answered as fault:
            return failure(*fault.args)

    # Checks of all requests.

    def _check(self, method: str, request: Request, body: bytes) -> None:
        headers = request.headers
        assert "transfer-encoding" not in headers
        if self.is_signed:
            assert signer({KEY: (SECRET, None)}, self.server.url(request.path), method, request, body) == KEY
            digest = headers["x-amz-content-sha256"]
            if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(body).hexdigest():
                raise Answered(400, "XAmzContentSHA256Mismatch")
        for name in headers:
            if name.startswith("x-amz-checksum-") and not self.rules.has_checksums:
                raise Answered(501, "NotImplemented")
        expected = headers.get("x-amz-checksum-crc32")
        if expected not in (None, checksum_of(body)):
            raise Answered(400, "BadDigest")

    def _check_condition(self, path: str, request: Request, *, obeys: bool) -> None:
        condition = request.headers.get("if-none-match")
        if condition is None or not obeys:
            return
        if condition != "*":
            raise Answered(501, "NotImplemented")
        if path in self.objects:
            raise Answered(412, "PreconditionFailed")

    # Requests.

    def _get(self, request: Request, body: bytes) -> Outcome:
        path = unquote(urlsplit(request.path).path)
        if path not in self.objects:
            raise Answered(404, "NoSuchKey")
        data = self.objects[path].data
        begin, end = request.range
        end = min(end, len(data))
        shown = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}", "ETag": tag_of(data)}
        return Outcome(206, data[begin:end], shown)

    def _head(self, request: Request, body: bytes) -> Outcome:
        path = unquote(urlsplit(request.path).path)
        if path not in self.objects:
            return Outcome(404)
        found = self.objects[path]
        return Outcome(200, b"", {**found.metadata, "Content-Length": str(len(found.data))})

    def _list(self, request: Request, body: bytes) -> Outcome:
        query = self._listing(request)
        assert query["list-type"] == "2"
        found, token = self._listed_objects(request, query["prefix"], query.get("continuation-token"))
        more = "" if token is None else f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(one.modified)}</LastModified>"
            f"<ETag>{escape(tag_of(one.data), _QUOTES)}</ETag><Size>{len(one.data)}</Size></Contents>"
            for key, one in found
        ]
        text = f"<ListBucketResult><Name>b</Name>{more}{''.join(rows)}</ListBucketResult>"
        return Outcome(200, text.encode())

    def _listing(self, request: Request) -> dict[str, str]:
        assert "range" not in request.headers
        return dict(parse_qsl(urlsplit(request.path).query, strict_parsing=True))

    def _listed_objects(
        self, request: Request, prefix: str, token: str | None
    ) -> tuple[list[tuple[str, Stored]], str | None]:
        """Return objects of a bucket by their keys, and the token for the next ones."""
        bucket = unquote(urlsplit(request.path).path)
        assert not bucket.endswith("/")
        start = f"{bucket}/{prefix}"
        found = sorted(path for path in self.objects if path.startswith(start))
        after = int(token.removeprefix("more+/=<")) if token else 0
        keys = found[after : after + self.page]
        rest = f"more+/=<{after + self.page}" if after + self.page < len(found) else None
        return [(path.removeprefix(f"{bucket}/"), self.objects[path]) for path in keys], rest

    def _delete(self, request: Request, body: bytes) -> Outcome:
        self.objects.pop(unquote(urlsplit(request.path).path), None)
        return Outcome(204)

    def _put(self, request: Request, body: bytes) -> Outcome:
        path = unquote(urlsplit(request.path).path)
        self._check_condition(path, request, obeys=self.rules.put_is_conditional)
        self.objects[path] = Stored(body, metadata_of(request))
        return Outcome(200, b"", {"ETag": tag_of(body)})

    def _begin(self, request: Request, body: bytes) -> Outcome:
        self._begun += 1
        # Like Amazon's names, with characters that must be escaped in a query and in XML.
        name = f"upload+{self._begun}/&=<"
        path, headers = unquote(urlsplit(request.path).path), request.headers
        self.uploads[name] = Parts(path, metadata_of(request), headers.get("x-amz-checksum-algorithm"))
        shown = name.replace("&", "&amp;").replace("<", "&lt;")
        return Outcome(200, f"<Result><UploadId>{shown}</UploadId></Result>".encode())

    def _upload(self, request: Request) -> tuple[str, Parts, dict[str, str]]:
        split = urlsplit(request.path)
        query = dict(parse_qsl(split.query, strict_parsing=True))
        name = query["uploadId"]
        if name not in self.uploads or self.uploads[name].path != unquote(split.path):
            raise Answered(404, "NoSuchUpload")
        return name, self.uploads[name], query

    def _part(self, request: Request, body: bytes) -> Outcome:
        _, upload, query = self._upload(request)
        number = int(query["partNumber"])
        if not 1 <= number <= MOST_PARTS:
            raise Answered(400, "InvalidArgument")
        expected = request.headers.get("x-amz-checksum-crc32")
        if (upload.algorithm == "CRC32") != (expected is not None):
            raise Answered(400, "InvalidRequest")
        upload.parts[number] = Part(body, tag_of(body), expected)
        return Outcome(200, b"", {"ETag": tag_of(body)})

    def _complete(self, request: Request, body: bytes) -> Outcome:
        name, upload, _ = self._upload(request)
        # The condition is checked first, and a refused completion leaves the parts.
        self._check_condition(upload.path, request, obeys=self.rules.completion_is_conditional)
        listed = self._listed(upload, body)
        sizes = [len(part.data) for part in listed]
        if any(size < LEAST_PART for size in sizes[:-1]):
            raise Answered(400, "EntityTooSmall")
        if self.rules.equal_parts and (len({*sizes[:-1]}) > 1 or sizes[-1] > sizes[0]):
            raise Answered(400, "InvalidPart")
        self.objects[upload.path] = Stored(b"".join(part.data for part in listed), upload.metadata)
        del self.uploads[name]
        # White space before the answer keeps the connection open.
        return Outcome(
            200, b"  <CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        )

    def _listed(self, upload: Parts, body: bytes) -> list[Part]:
        root = ElementTree.fromstring(body)
        space = re.match(r"\{.*\}", root.tag)
        assert space is not None
        assert root.tag == f"{space[0]}CompleteMultipartUpload"
        listed, before = [], 0
        for element in root:
            number = int(element.findtext(f"{space[0]}PartNumber", ""))
            if number <= before:
                raise Answered(400, "InvalidPartOrder")
            before, part = number, upload.parts.get(number)
            if part is None or element.findtext(f"{space[0]}ETag") != part.tag:
                raise Answered(400, "InvalidPart")
            if element.findtext(f"{space[0]}ChecksumCRC32") != part.checksum:
                raise Answered(400, "InvalidPart")
            listed.append(part)
        if not listed:
            raise Answered(400, "MalformedXML")
        return listed

    def _abort(self, request: Request, body: bytes) -> Outcome:
        name, _, _ = self._upload(request)
        del self.uploads[name]
        return Outcome(204)


class Azure(Store):
    """Azure's store: the parts of all writers of an object belong to its name until one of them completes."""

    @property
    def options(self) -> dict[str, object]:
        return {"endpoint": self.server.url(""), "account": "me", "account_key": AZURE_KEY}

    def _kind(self, method: str, request: Request) -> str:
        comp = dict(parse_qsl(urlsplit(request.path).query)).get("comp", "")
        return {"block": "part", "blocklist": "complete", "list": "list"}.get(comp, method.lower())

    def _check(self, method: str, request: Request, body: bytes) -> None:
        if request.headers["authorization"] != azure_signature(
            method, self.server.url(request.path), request
        ):
            raise Answered(403, "AuthenticationFailed")

    def _put(self, request: Request, body: bytes) -> Outcome:
        assert request.headers["x-ms-blob-type"] == "BlockBlob"
        return self._made(unquote(urlsplit(request.path).path), request, body)

    def _list(self, request: Request, body: bytes) -> Outcome:
        query = self._listing(request)
        assert query["restype"] == "container"
        found, token = self._listed_objects(request, query["prefix"], query.get("marker"))
        rows = [
            f"<Blob><Name>{escape(key)}</Name><Properties>"
            f"<Last-Modified>{formatdate(one.modified, usegmt=True)}</Last-Modified>"
            f"<Etag>{escape(tag_of(one.data))}</Etag><Content-Length>{len(one.data)}</Content-Length>"
            f"</Properties></Blob>"
            for key, one in found
        ]
        more = "<NextMarker />" if token is None else f"<NextMarker>{escape(token)}</NextMarker>"
        text = f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs>{more}</EnumerationResults>"
        return Outcome(200, text.encode())

    def _made(self, path: str, request: Request, data: bytes) -> Outcome:
        if request.headers.get("if-none-match") == "*" and path in self.objects:
            raise Answered(409, "BlobAlreadyExists")
        self.objects[path] = Stored(data, metadata_of(request, "x-ms-meta-"))
        return Outcome(201, b"", {"ETag": tag_of(data)})

    def _part(self, request: Request, body: bytes) -> Outcome:
        split = urlsplit(request.path)
        name = dict(parse_qsl(split.query))["blockid"]
        path = unquote(split.path)
        upload = self.uploads.setdefault(path, Parts(path, {}, None))
        decoded = base64.b64decode(name, validate=True)
        known = {len(one.tag) for one in upload.parts.values()}
        if len(decoded) > 64 or not known <= {len(name)}:
            raise Answered(400, "InvalidBlobOrBlock")
        upload.parts[int(decoded[-5:])] = Part(body, name, None)
        return Outcome(201)

    def _complete(self, request: Request, body: bytes) -> Outcome:
        path = unquote(urlsplit(request.path).path)
        sent = {part.tag: part.data for part in self.uploads.get(path, Parts(path, {}, None)).parts.values()}
        committed = self.committed.get(path, {})
        listed = [element.text or "" for element in ElementTree.fromstring(body).iterfind("Latest")]
        found = [sent.get(name, committed.get(name)) for name in listed]
        if None in found or not found:
            raise Answered(400, "InvalidBlockList")
        data = [one for one in found if one is not None]
        outcome = self._made(path, request, b"".join(data))
        self.committed[path] = dict(zip(listed, data, strict=True))
        self.uploads.pop(path, None)
        return outcome

    @property
    def committed(self) -> dict[str, dict[str, bytes]]:
        return self.__dict__.setdefault("_committed", {})


AZURE_KEY = base64.b64encode(b"secret of the tests").decode()


def azure_signature(method: str, url: str, request: Request) -> str:
    """Return the header with the signature of a request, according to Azure's SDK."""
    from azure.core.pipeline import PipelineContext, PipelineRequest
    from azure.core.pipeline.transport import HttpRequest
    from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy

    headers = {name: value for name, value in request.headers.items() if name != "authorization"}
    # Azure's rule covers this header, by which the SDK's code calls it.
    headers["byte_range"] = headers.pop("range", "")
    again = HttpRequest(method, url, headers=headers)
    SharedKeyCredentialPolicy("me", AZURE_KEY).on_request(PipelineRequest(again, PipelineContext(None)))
    return str(again.headers["Authorization"])


def failure(status: int, code: str, message: str = "") -> Outcome:
    return Outcome(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


FAILURES = {
    "refused": failure(403, "AccessDenied"),
    "throttled": Outcome(503, b"<Error><Code>SlowDown</Code></Error>", {"Retry-After": "0"}),
    "failed": failure(500, "InternalError"),
    "failed in 200": failure(200, "InternalError"),
    "no bucket": failure(404, "NoSuchBucket"),
    # Another conditional request for the object is in progress. S3 may require new parts.
    "conflict": failure(409, "ConditionalRequestConflict"),
    "conflict without parts": failure(409, "ConditionalRequestConflict"),
    "exists": failure(412, "PreconditionFailed"),
    "leased": failure(412, "LeaseIdMissing"),
    "skewed": failure(403, "RequestTimeTooSkewed"),
}


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metadata_of(request: Request, prefix: str = "x-amz-meta-") -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.startswith(prefix)}


def checksum_of(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def tag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


@contextmanager
def running(rules: Rules = STORES["s3"], kind: type[Store] = Store, **facts: bool) -> Iterator[Store]:
    store = kind(rules, **facts)
    with serving(store.answer) as store.server:
        yield store
