"""Hashes and digests of files at URLs: every definition, in parts that are fetched in parallel."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.errors import raises
from support.servers import Answer, Handler, Request, good, serving

TENSORS = {"big": np.arange(3_000_000), "b": np.arange(7, dtype=np.float32), "c": np.arange(50_000)}
#: More than one part of 8 MiB, so that the parts must be put in order.
DATA = ingot.numpy.save(TENSORS, {"ss_network_dim": "8", "title": "x"})
DEFINITIONS = [
    *(
        "sha256",
        "blake3",
        "xxh3",
        "xxh3_128",
        "autov1",
        "autov2",
        "autov3",
        "autov3_short",
        "sshs_legacy",
        "modelspec",
        "crc32",
    ),
    *("md5", "sha512"),
]


def test_hash_of_a_url_equals_the_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(DATA)
    with serving(good(DATA)) as server:
        for definition in DEFINITIONS:
            assert ingot.hash(server.url(), definition) == ingot.hash(path, definition), definition


def test_hash_of_a_url_takes_any_file(tmp_path: Path) -> None:
    for data in (b"", b"abc", bytes(9 << 20)):
        with serving(good(data)) as server:
            assert ingot.hash(server.url()) == hashlib.sha256(data).hexdigest()
            assert ingot.hash(server.url(), "md5") == hashlib.md5(data).hexdigest()
            with pytest.raises(ingot.HeaderError):
                ingot.hash(server.url(), "autov3")


def test_hash_of_a_url_fetches_each_part_once() -> None:
    with serving(good(DATA)) as server:
        ingot.hash(server.url(), "blake3")
        assert server.sent < len(DATA) + (1 << 20)
        assert 3 < len(server.requests) < 40


def test_hash_of_a_url_reports_progress() -> None:
    told: list[tuple[int, int]] = []
    with serving(good(DATA)) as server:
        ingot.hash(server.url(), progress=lambda *pair: told.append(pair))
    assert told[-1] == (len(DATA), len(DATA))


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture(scope="module", params=["blake3", "sha256"])
def digested(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Write a file that stores digests of its tensors."""
    path = tmp_path_factory.mktemp("digests") / "m.safetensors"
    ingot.numpy.save_file(TENSORS, path, checksums=[request.param, "modelspec"])
    return path.read_bytes()


def test_verify_of_a_url_names_the_differing_tensor(digested: bytes) -> None:
    with serving(good(digested)) as server:
        report = ingot.verify(
            server.url(), expected_sha256=hashlib.sha256(digested).hexdigest(), raises=False
        )
        assert report.ok
        assert report.checked == 3
    with serving(good(damaged(digested))) as server:
        report = ingot.verify(server.url(), raises=False)
        assert not report.ok
        assert [row.tensor for row in report.bad] == ["b"]


def test_load_file_of_a_url_verifies(digested: bytes) -> None:
    whole = hashlib.sha256(digested).hexdigest()
    with serving(good(digested)) as server:
        both = {"verify": True, "expected_sha256": whole}
        for options in ({"verify": True}, {"expected_sha256": whole}, both):
            server.requests.clear()
            found = ingot.numpy.load_file(server.url(), **options)
            assert all(np.array_equal(found[name], TENSORS[name]) for name in TENSORS)
            # Requests are counted when they arrive; bytes only after the client has read them.
            ranges = [request.range for request in server.requests]
            assert sum(min(end, len(digested)) - begin for begin, end in ranges) < len(digested) + (1 << 20)
        part = ingot.numpy.load_file(server.url(), keys=["c"], verify=True)
        assert np.array_equal(part["c"], TENSORS["c"])
        with raises(ingot.IntegrityError, code="digest-mismatch", path=server.url()):
            ingot.numpy.load_file(server.url(), expected_sha256="0" * 64)
    with serving(good(damaged(digested))) as server, raises(ingot.IntegrityError, tensor="b"):
        ingot.numpy.load_file(server.url(), verify=True)


def test_load_file_verifies_small_tensors_in_few_requests() -> None:
    tensors = {f"t{n:03}": np.full(1000, n) for n in range(500)}
    data = ingot.numpy.save(tensors)
    with serving(good(data)) as server:
        found = ingot.numpy.load_file(server.url(), expected_sha256=hashlib.sha256(data).hexdigest())
        assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
        assert len(server.requests) < 20


def changes_after(requests: int, data: bytes, other: bytes) -> Answer:
    """Return the answer of a server whose file is replaced after this number of requests."""
    count = [0]
    lock = threading.Lock()

    def answer(handler: Handler, request: Request) -> None:
        with lock:
            count[0] += 1
            is_old = count[0] <= requests
        if is_old:
            handler.part(data, request, ETag='"v1"')
        elif request.headers.get("if-match") == '"v1"':
            handler.head(412, Content_Length=0)
        else:
            handler.part(other, request, ETag='"v2"')

    return answer


def test_n9_hash_of_two_versions_is_an_error() -> None:
    for definition in ("sha256", "blake3", "md5"):
        answer = changes_after(2, DATA, DATA[::-1])
        with serving(answer) as server, raises(ingot.StorageError, code="changed"):
            ingot.hash(server.url(), definition)
