"""Files behind URLs, from a correct server: the requests, their number, and the results."""

from __future__ import annotations

import os
import pickle
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.processes import python
from support.servers import Handler, Request, good, serving

START = 128 << 10


def a_file(tensors: dict[str, np.ndarray], **options: object) -> bytes:
    return ingot.numpy.save(tensors, **options)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    large = {f"large.{n}": random.integers(0, 255, (1024, 2048), np.uint8) for n in range(4)}
    small = {f"small.{n}": random.random(33, np.float32) for n in range(200)}
    return {**large, **small, "empty": np.zeros((0, 3), np.int64), "scalar": np.float64(2.5)}


@pytest.fixture(scope="module")
def data(tensors: dict[str, np.ndarray]) -> bytes:
    return a_file(tensors, metadata={"who": "me"})


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in found
    )


def test_safe_open_reads_the_header_in_one_request(data: bytes, tensors: dict[str, np.ndarray]) -> None:
    with serving(good(data)) as server, ingot.safe_open(server.url(), "np") as file:
        assert [request.range for request in server.requests] == [(0, START)]
        assert len(file) == len(tensors)
        assert file.metadata() == {"who": "me"}
        assert (file.path, file.backend, file.format) == (server.url(), "http", "safetensors")
        assert file.why
        asked = server.requests[0].headers
        assert asked["accept-encoding"] == "identity"
        assert "authorization" not in asked


def test_safe_open_reads_a_long_header_in_two_requests() -> None:
    tensors = {f"a.rather.long.name.of.a.tensor.{n:06}": np.zeros(1, np.uint8) for n in range(5000)}
    data = a_file(tensors)
    head = 8 + int.from_bytes(data[:8], "little")
    assert head > START
    with serving(good(data)) as server:
        assert len(ingot.safe_open(server.url(), "np")) == 5000
        assert [request.range for request in server.requests] == [(0, START), (START, head)]


def test_safe_open_reads_a_small_file_in_one_request() -> None:
    tensors = {"a": np.arange(1000)}
    with serving(good(a_file(tensors))) as server:
        assert same(ingot.numpy.load_file(server.url()), tensors)
        assert len(server.requests) == 1


def test_load_file_reads_files_without_tensors_or_bytes() -> None:
    with serving(good(a_file({}))) as server:
        assert ingot.numpy.load_file(server.url()) == {}
    with (
        serving(good(b"")) as server,
        pytest.raises(ingot.HeaderError, match=r"model\.safetensors: ") as caught,
    ):
        ingot.safe_open(server.url(), "np")
    assert caught.value.path == server.url()


@pytest.mark.parametrize("rows", [slice(0, 128), slice(896, 1024), slice(300, 428)])
def test_get_slice_of_rows_transfers_little_more(rows: slice) -> None:
    tensor = np.random.default_rng(1).integers(0, 255, (1024, 16384), np.uint8)
    with serving(good(a_file({"a": tensor}))) as server:
        file = ingot.safe_open(server.url(), "np")
        part = file.get_slice("a")[rows]
        assert np.array_equal(part, tensor[rows])
        # The first request, for the header, also returns a few rows.
        assert server.sent - START <= 1.05 * part.nbytes


def test_get_slice_of_columns_takes_few_requests(data: bytes) -> None:
    tensor = np.random.default_rng(1).integers(0, 255, (2000, 4096), np.uint8)
    with serving(good(a_file({"a": tensor}))) as server:
        part = ingot.safe_open(server.url(), "np").get_slice("a")[:, 1024:1536]
        assert np.array_equal(part, tensor[:, 1024:1536])
        assert len(server.requests) < 10


def test_load_file_reads_close_tensors_together(data: bytes, tensors: dict[str, np.ndarray]) -> None:
    some = [name for name in tensors if name.startswith("small.")][::2]
    with serving(good(a_file({**tensors, "z": np.zeros(START, np.uint8)}))) as server:
        found = ingot.numpy.load_file(server.url(), keys=some)
        assert same(found, {name: tensors[name] for name in some})
        assert len(server.requests) <= 3


def test_connections_are_reused(data: bytes) -> None:
    ports = set()

    def answer(handler: Handler, request: Request) -> None:
        ports.add(handler.client_address[1])
        handler.part(data, request)

    with serving(answer) as server:
        with ingot.safe_open(server.url(), "np") as file:
            for name in file.keys()[:50]:
                file[name]
        # Two parts of a large tensor are read at once, and more may begin before a connection is free again.
        assert len(ports) * 3 < len(server.requests)


def test_connections_closed_between_requests_are_no_failure(data: bytes) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.part(data, request)
        handler.close_connection = True

    with serving(answer) as server:
        file = ingot.safe_open(server.url(), "np", storage_options={"retries": 0})
        for name in ("large.0", "large.1", "large.2"):
            assert file[name].shape == (1024, 2048)


def test_storage_options_are_rejected_without_their_values() -> None:
    url = "http://127.0.0.1:9/x"
    for options, fault in [
        ({"tokn": "hunter2"}, ingot.OptionError),
        ({"retries": "hunter2"}, TypeError),
        ({"timeout": -1}, ingot.OptionError),
        ({"headers": {"Range": "hunter2"}}, ingot.OptionError),
        ({"headers": {"X": "hunter2\r\nY: z"}}, ingot.OptionError),
        ({"token": "hunter2\n\n"}, ingot.OptionError),
        ({"access_key_id": "hunter2"}, ingot.OptionError),
        ({"ca_file": "/does/not/exist"}, ingot.OptionError),
    ]:
        target = url.replace("http:", "https:") if "ca_file" in options else url
        with pytest.raises(fault) as caught:
            ingot.safe_open(target, "np", storage_options={"retries": 0, **options})
        assert "hunter2" not in str(caught.value), options


def test_safe_open_rejects_mapping_a_url() -> None:
    with pytest.raises(ingot.OptionError, match="mmap"):
        ingot.safe_open("http://127.0.0.1:9/x", "np", backend="mmap")


def test_safe_open_takes_no_path_for_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http:/x.safetensors", "https_x", "file:x"):
        Path(name).parent.mkdir(exist_ok=True)
        ingot.numpy.save_file({"a": np.arange(3)}, name)
        assert ingot.safe_open(name, "np").keys() == ["a"]
    # The name belongs to a directory.
    with pytest.raises(FileNotFoundError):
        ingot.safe_open(Path("http://127.0.0.1:9/x"), "np")
    # A URL is a str. A `Path` that looks like a URL is neither a valid path nor a URL.
    for path in (Path("https://127.0.0.1:9/x"), b"http://127.0.0.1:9/x", "http://127.0.0.1:9/\udcff"):
        with pytest.raises(ingot.OptionError, match="is a URL: expected a path"):
            ingot.safe_open(path, "np")


def test_safe_open_of_a_url_is_pickled(data: bytes) -> None:
    with serving(good(data)) as server:
        url = server.url("/model.safetensors?sig=1")
        file = ingot.safe_open(url, "np", storage_options={"token": "t0ken"})
        assert file.path == server.url("/model.safetensors?…")
        again = pickle.loads(pickle.dumps(file))
        assert np.array_equal(again["small.1"], file["small.1"])
        assert server.requests[-1].path == "/model.safetensors?sig=1"
        assert server.requests[-1].headers["authorization"] == "Bearer t0ken"


def test_load_file_of_a_url_serves_many_threads(data: bytes, tensors: dict[str, np.ndarray]) -> None:
    wrong = []

    def read(file: ingot.safe_open, names: list[str]) -> None:
        wrong.extend(name for name in names if not np.array_equal(file[name], tensors[name]))

    with serving(good(data)) as server, ingot.safe_open(server.url(), "np") as file:
        names = file.keys()
        threads = [threading.Thread(target=read, args=(file, names[n::4])) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_connections_are_not_shared_after_a_fork(data: bytes, tensors: dict[str, np.ndarray]) -> None:
    ports: list[int] = []

    def answer(handler: Handler, request: Request) -> None:
        ports.append(handler.client_address[1])
        handler.part(data, request)

    with serving(answer) as server:
        script = f"""
            import os, sys
            import ingot, numpy
            file = ingot.safe_open({server.url()!r}, "np")
            before = file["large.0"].sum()
            child = os.fork()
            if child == 0:
                os._exit(0 if file["large.0"].sum() == before else 1)
            assert file["large.0"].sum() == before
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        assert python("-c", textwrap.dedent(script)).code == 0
        # After the fork, the processes used different connections, and each closed its own.
        assert len(set(ports)) >= 2


def test_connections_are_opened_on_the_first_request() -> None:
    with serving(good(b"")) as server:
        script = f"import ingot, ingot.numpy; ingot._native.is_url({server.url()!r}) or quit(1)"
        assert python("-c", script).code == 0
        assert server.requests == []


def test_prefault_returns_the_bytes_of_the_tensors(data: bytes) -> None:
    with serving(good(data)) as server, ingot.safe_open(server.url(), "np") as file:
        assert file.warm(["large.0"]) == 1024 * 2048
