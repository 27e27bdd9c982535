"""Sharded checkpoints at URLs: an index, and shards beside it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.errors import raises
from support.servers import Handler, Request, Server, serving
from support.shards import INDEX, NAMES, checkpoint, folder, same, tensors

FILES = checkpoint()


def index_of(weight_map: dict[str, str]) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


def names(server: Server) -> list[str]:
    """Return the requested names without queries."""
    return [unquote(request.path.partition("?")[0]).removeprefix("/model/") for request in server.requests]


def test_safe_open_of_an_index_reads_no_shards() -> None:
    with serving(folder(FILES)) as server:
        url = server.url(f"/model/{INDEX}")
        file = ingot.safe_open(url, "np")
        assert names(server) == [INDEX]
        assert (file.path, file.backend, file.format) == (url, "http", "safetensors")
        assert file.keys() == sorted(tensors())
        assert len(file) == len(tensors())
        assert "layers.0.bias" in file
        assert file.metadata()["seed"] == 0
        assert file.shards[1] == server.url(f"/model/{NAMES[1]}")
        assert file.shard_of("layers.1.bias") == file.shards[1]
        assert len(server.requests) == 1


def test_inspect_of_an_index_takes_one_request(tmp_path: Path) -> None:
    with serving(folder(FILES)) as server:
        index = ingot.inspect(
            server.url(f"/model/{INDEX}"), shards=False, storage_options={"token": "secret"}
        )
        assert names(server) == [INDEX]
        assert server.requests[0].headers["authorization"] == "Bearer secret"
        (tmp_path / INDEX).write_bytes(FILES[INDEX])
        local = ingot.inspect(tmp_path / INDEX, shards=False)
        assert index == local == ingot.inspect(tmp_path, shards=False)
        assert list(index.weight_map) == list(json.loads(FILES[INDEX])["weight_map"])
        assert (index.sharded, index.files_metadata, index.parameter_count) == (True, {}, {})
        with pytest.raises(FileNotFoundError):
            ingot.inspect(server.url("/model/absent.json"), shards=False)
        one = ingot.inspect(server.url(f"/model/{NAMES[0]}"), shards=False)
        assert (one.sharded, list(one.files_metadata)) == (False, [NAMES[0]])
        with pytest.raises(ingot.OptionError, match="nope"):
            ingot.inspect(server.url(f"/model/{INDEX}"), shards=False, storage_options={"nope": 1})  # type: ignore[typeddict-unknown-key]


def test_get_tensor_requests_its_own_shard() -> None:
    with serving(folder(FILES)) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        assert np.array_equal(file["layers.1.weight"], tensors()["layers.1.weight"])
        part = file.get_slice("layers.1.weight")[3:5, ::2]
        assert np.array_equal(part, tensors()["layers.1.weight"][3:5, ::2])
        assert set(names(server)) == {INDEX, NAMES[1]}
        assert file.info("layers.2.bias").shape == (7,)
        assert names(server)[-1] == NAMES[2]


def test_parameter_count_requests_each_header_once() -> None:
    with serving(folder(FILES)) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        assert file.parameter_count() == {"U8": sum(array.size for array in tensors().values())}
        assert sorted(names(server)) == sorted([INDEX, *NAMES])
        assert file.offset_keys()
        assert file.shard_metadata() == dict.fromkeys(NAMES)
        assert len(server.requests) == 1 + len(NAMES)


def test_parameter_count_sizes_a_header_by_the_index() -> None:
    many = {f"model.layers.{number}.self_attn.q_proj.weight": np.zeros(1, np.int8) for number in range(5000)}
    shard = ingot.numpy.save(many, metadata={"format": "pt"})
    header = int.from_bytes(shard[:8], "little") + 8
    files = {INDEX: index_of(dict.fromkeys(many, "a.safetensors")), "a.safetensors": shard}
    with serving(folder(files)) as server:
        assert ingot.safe_open(server.url(f"/model/{INDEX}"), "np").parameter_count() == {"I8": 5000}
        assert names(server) == [INDEX, "a.safetensors"]
        assert header > 128 << 10
        assert header <= server.requests[1].range[1] < 2 * header


def test_parameter_count_requests_a_longer_header_again() -> None:
    shard = ingot.numpy.save({"a": np.arange(5)}, metadata={"text": "x" * 300_000})
    files = {INDEX: index_of({"a": "a.safetensors"}), "a.safetensors": shard}
    with serving(folder(files)) as server:
        assert ingot.safe_open(server.url(f"/model/{INDEX}"), "np").parameter_count() == {"I64": 5}
        assert names(server) == [INDEX, "a.safetensors", "a.safetensors"]


def test_safe_open_requests_a_long_index_again() -> None:
    weight_map = {f"{'x' * 2000}.{number}": NAMES[0] for number in range(9_000)}
    with serving(folder({INDEX: index_of(weight_map)})) as server:
        assert len(ingot.safe_open(server.url(f"/model/{INDEX}"), "np")) == 9_000
        assert names(server) == [INDEX, INDEX]


def test_load_file_detects_an_index_by_contents() -> None:
    files = {**FILES, "latest": FILES[INDEX]}
    with serving(folder(files)) as server:
        assert same(ingot.numpy.load_file(server.url("/model/latest")))
        # One request is enough: it is the first request of any file, and returns all of a short one.
        assert names(server).count("latest") == 1


def test_load_file_reads_shards_beside_the_original_url() -> None:
    with serving(folder(FILES, "/store/")) as store:

        def answer(handler: Handler, request: Request) -> None:
            name = request.path.removeprefix("/model/")
            handler.head(302, Location=store.url(f"/store/{name}"), Content_Length=0)

        with serving(answer) as server:
            options = {"allow_private_redirects": True}
            assert same(ingot.numpy.load_file(server.url(f"/model/{INDEX}"), storage_options=options))
            assert {INDEX, *NAMES} == set(names(server))


def test_load_file_keeps_query_and_token_for_shards() -> None:
    with serving(folder(FILES)) as server:
        options = {"token": "hf_secret", "headers": {"X-Key": "k3y"}}
        file = ingot.safe_open(server.url(f"/model/{INDEX}?sig=s3cret"), "np", storage_options=options)
        assert same(file.get_tensors())
        for request in server.requests:
            assert request.path.endswith("?sig=s3cret")
            assert request.headers["authorization"] == "Bearer hf_secret"
            assert request.headers["x-key"] == "k3y"
        assert not any("s3cret" in path for path in [file.path, *file.shards])


IN_URLS = json.loads((Path(__file__).parents[1] / "vectors" / "shards_in_urls.json").read_text("utf-8"))


@pytest.mark.parametrize("vector", IN_URLS, ids=lambda vector: ascii(vector["shard"][:40]))
def test_x1_decoded_shard_name_stays_in_its_folder(vector: dict, tmp_path: Path) -> None:
    shard = vector["shard"]
    files = {INDEX: index_of({"good": NAMES[0], "odd": shard}), NAMES[0]: FILES[NAMES[0]]}
    with serving(folder(files)) as server:
        url = server.url(f"/model/{INDEX}")
        reads = [lambda: ingot.safe_open(url, "np")["odd"], lambda: ingot.download(url, f"{tmp_path}/")]
        for fails in reads:
            with pytest.raises((ingot.CheckpointError, FileNotFoundError)) as caught:
                fails()
            assert isinstance(caught.value, FileNotFoundError) == vector["accepted"]
            if not vector["accepted"]:
                assert caught.value.code == "invalid-shard-name"
        assert vector["accepted"] or names(server) == [INDEX] * 2
    assert not list(tmp_path.iterdir())


def test_x1_percent_sign_on_a_disk_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "%2e%2e").mkdir()
    ingot.numpy.save_file({"a": np.arange(3)}, tmp_path / "%2e%2e" / "x.safetensors")
    (tmp_path / INDEX).write_bytes(index_of({"a": "%2e%2e/x.safetensors"}))
    assert np.array_equal(ingot.numpy.load_file(tmp_path / INDEX)["a"], np.arange(3))


def test_missing_shard_is_named() -> None:
    files = {name: data for name, data in FILES.items() if name != NAMES[1]}
    with serving(folder(files)) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}?sig=s3cret"), "np")
        assert file["layers.0.bias"].shape == (7,)
        for fails in (file.parameter_count, lambda: file["layers.1.bias"], file.get_tensors):
            with pytest.raises(FileNotFoundError, match="404") as caught:
                fails()
            assert caught.value.filename == server.url(f"/model/{NAMES[1]}?…")
        assert np.array_equal(file["layers.2.weight"], tensors()["layers.2.weight"])


def test_missing_index_is_named() -> None:
    with serving(folder({})) as server, pytest.raises(FileNotFoundError) as caught:
        ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
    assert caught.value.filename == server.url(f"/model/{INDEX}")


def test_safe_open_rejects_a_large_index_by_its_size() -> None:
    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        handler.head(206, Content_Range=f"bytes {begin}-{end - 1}/300000000", Content_Length=end - begin)
        handler.body(b"{" + b" " * (end - begin - 1))

    with serving(answer) as server:
        with raises(ingot.CheckpointError, code="index-too-large"):
            ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        assert len(server.requests) == 1


def test_get_tensor_rejects_a_replaced_shard() -> None:
    version = ["v1"]

    def answer(handler: Handler, request: Request) -> None:
        name = unquote(request.path).removeprefix("/model/")
        handler.part(FILES[name], request, ETag=f'"{version[0]}"')

    with serving(answer) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        file.parameter_count()
        version[0] = "v2"
        with raises(ingot.StorageError, "was written to", code="changed", path=file.shards[0]):
            file["layers.0.weight"]


def many(count: int) -> dict[str, bytes]:
    shard = {number: ingot.numpy.save({f"t{number}": np.arange(3)}) for number in range(count)}
    files = {f"{number:05}.safetensors": data for number, data in shard.items()}
    return {INDEX: index_of({f"t{number}": f"{number:05}.safetensors" for number in range(count)}), **files}


def open_connections(server: Server) -> int:
    """Return how many connections this process has to the server, if the system lists them."""
    tables = [Path("/proc/self/net/tcp")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return sum(line[2].endswith(f":{server.port:04X}") and line[3] == "01" for line in lines[1:])


def test_open_requests_headers_at_once_and_reuses_connections() -> None:
    # The server answers when 32 requests wait.
    together = threading.Barrier(32)
    lock = threading.Lock()
    files, ports = many(160), set()
    answer = folder(files)

    def late(handler: Handler, request: Request) -> None:
        with lock:
            ports.add(handler.client_address[1])
        if not request.path.endswith(INDEX):
            together.wait(timeout=30)
        answer(handler, request)

    with serving(late) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        assert file.parameter_count() == {"I64": 480}
        assert len(server.requests) == 161
        # 97 at a time: 96 headers and the index. A busy machine closes a few connections that miss the
        # pool in time. Without a pool there would be 161.
        assert len(ports) <= 112
        # The connections that reads do not need are closed.
        assert open_connections(server) <= 16


def test_parameter_count_stops_at_the_first_failing_shard() -> None:
    files, over = many(400), threading.Event()
    missing = "00003.safetensors"
    del files[missing]
    answer = folder(files)

    def only_what_fails(handler: Handler, request: Request) -> None:
        if not request.path.endswith((INDEX, missing)):
            over.wait(60)
        answer(handler, request)

    with serving(only_what_fails) as server:
        file = ingot.safe_open(server.url(f"/model/{INDEX}"), "np")
        try:
            with pytest.raises(FileNotFoundError, match="404") as caught:
                file.parameter_count()
            assert not over.is_set()
            assert caught.value.filename == file.shards[3]
            assert len(server.requests) < 300
        finally:
            over.set()


STORES = {
    "s3://models/a//b/": ("/models/a//b/", {"anonymous": True}),
    "gs://models/a/": ("/models/a/", {}),
    "az://models/a/": ("/models/a/", {"account": "me", "sas_token": "sig=s3cret"}),
}


@pytest.mark.parametrize("place", STORES)
def test_load_file_reads_shards_of_a_store_beside_their_index(place: str) -> None:
    at, options = STORES[place]
    with serving(folder(FILES, at)) as server:
        options = {**options, "endpoint": server.url("")}
        file = ingot.safe_open(place + INDEX, "np", storage_options=options)
        assert same(file.get_tensors())
        assert (file.path, file.backend) == (place + INDEX, place[:2])
        assert file.shards == [place + name for name in NAMES]
        has_signature = [request.path.endswith("?sig=s3cret") for request in server.requests]
        assert all(has_signature) == any(has_signature) == ("sas_token" in options)


def test_load_file_requests_shards_without_the_version_of_the_index() -> None:
    with serving(folder(FILES, "/models/")) as server:
        options = {"endpoint": server.url(""), "anonymous": True}
        url = f"s3://models/{INDEX}?versionId=abc"
        file = ingot.safe_open(url, "np", storage_options=options)
        assert same(file.get_tensors())
        assert file.shards[0] == f"s3://models/{NAMES[0]}"
        assert [request.path for request in server.requests if "?" in request.path] == [
            f"/models/{INDEX}?versionId=abc"
        ]
