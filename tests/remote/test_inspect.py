"""`ingot.inspect` of URLs: its results and its requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import pytest
from huggingface_hub import HfApi

import ingot
from support import hub_metadata
from support.counted_models import INDEX, files_of, write
from support.hubs import TOKEN, take_the_place
from support.servers import Handler, Request, Server, serving
from vectors.case import counts

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = "/api/models/me/gpt/safetensors-metadata/"
SHARDED = [case for case in counts() if len(case["files"]) > 1]
SINGLE = [case for case in counts() if len(case["files"]) == 1]
SHARDS = next(case for case in counts() if case["name"] == "mlx-across-shards")

cases = pytest.mark.parametrize


def document_of(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the Hub's document about all shards."""
    header = {name: data[8 : 8 + int.from_bytes(data[:8], "little")] for name, data in files.items()}
    shards = {name: json.loads(text) for name, text in header.items() if name.endswith(".safetensors")}
    return {"index": {"metadata": json.loads(files[INDEX])["metadata"]}, "headers": shards}


class Hub:
    """A server that imitates the Hub with one model, and a plain server."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        #: By the name of the index.
        self.documents: dict[str, bytes] = {}
        self.server: Server | None = None
        #: The same files on a plain server.
        self.other: Server | None = None

    def answer(self, handler: Handler, request: Request) -> None:
        path = unquote(request.path.partition("?")[0])
        name = path.rpartition("/")[2]
        headers: dict[str, str | int] = {"X_Repo_Commit": COMMIT}
        if path.startswith("/me/gpt/resolve/") and path.split("/")[4] in ("main", COMMIT):
            data = self.files.get(path.split("/", 5)[5])
        elif path.startswith(API):
            data, headers = self.documents.get(path.removeprefix(API)), {}
        else:
            data, headers = self.files.get(name) if path.startswith("/plain/") else None, {}
        if data is None:
            handler.head(404, X_Error_Code="EntryNotFound", Content_Length=0, **headers)
        elif "range" in request.headers and not path.startswith(API):
            handler.part(data, request, ETag=f'"{name}"', **headers)
        else:
            handler.head(200, ETag=f'"{name}"', Content_Length=len(data), **headers)
            if handler.command != "HEAD":
                handler.body(data)

    def asked(self) -> list[str]:
        """Return the paths requested from the Hub."""
        return [unquote(request.path) for request in self.server.requests]

    def headers_asked(self) -> list[str]:
        return [path for path in self.asked() if not path.endswith("config.json")]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(files_of(SHARDS))
    hub.documents[INDEX] = json.dumps(document_of(hub.files)).encode()
    # The client of the Hub looks at its environment once, when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "client"))
    with serving(hub.answer) as hub.server, serving(hub.answer) as hub.other:
        take_the_place(hub.server, tmp_path / "home", monkeypatch)
        yield hub


def hold(hub: Hub, case: dict[str, Any]) -> None:
    """Serve the model of a vector from the Hub."""
    hub.files = files_of(case)
    hub.documents = {INDEX: json.dumps(document_of(hub.files)).encode()} if INDEX in hub.files else {}


def check(found: ingot.RepoMetadata, case: dict[str, Any]) -> None:
    assert (found.parameter_count, found.parameter_total) == (case["logical"], case["total"])


# The golden vectors


@cases("case", SHARDED, ids=lambda case: case["name"])
def test_inspect_counts_shards_by_the_hubs_document(hub: Hub, case: dict[str, Any], tmp_path: Path) -> None:
    hold(hub, case)
    check(ingot.inspect("hf://me/gpt"), case)
    assert ingot.inspect("hf://me/gpt", count="stored").parameter_count == case["stored"]
    assert ingot.inspect("hf://me/gpt") == ingot.inspect(write(tmp_path / "model", hub.files))


@cases("case", SINGLE, ids=lambda case: case["name"])
def test_inspect_reads_the_config_beside_a_url(hub: Hub, case: dict[str, Any], tmp_path: Path) -> None:
    hold(hub, case)
    folder = write(tmp_path / "model", hub.files)
    for url in ("hf://me/gpt", hub.other.url("/plain/model.safetensors?signature=x")):
        check(ingot.inspect(url), case)
        assert ingot.inspect(url, count="stored").parameter_count == case["stored"]
        assert ingot.inspect(url) == ingot.inspect(folder)


# Results of huggingface_hub


def client(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.server.url(""), token=TOKEN)


@cases("case", [*SHARDED, *SINGLE], ids=lambda case: case["name"])
def test_inspect_of_a_url_equals_huggingface_hub(hub: Hub, case: dict[str, Any]) -> None:
    hold(hub, case)
    described = ingot.inspect("hf://me/gpt", count="stored")
    assert described.parameter_total == sum(case["stored"].values())
    found = hub_metadata.of_repo(described)
    assert found == asdict(client(hub).get_safetensors_metadata("me/gpt"))
    if INDEX in hub.files:
        assert found == asdict(client(hub).get_sharded_safetensors_metadata("me/gpt"))


# Requests


def test_inspect_reads_all_headers_in_one_request(hub: Hub) -> None:
    check(ingot.inspect(f"hf://me/gpt/{INDEX}"), SHARDS)
    assert hub.headers_asked() == [API + INDEX]
    assert len(hub.asked()) == 2
    assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in hub.server.requests)


def test_inspect_of_a_repository_takes_one_more_request(hub: Hub) -> None:
    check(ingot.inspect("hf://me/gpt"), SHARDS)
    assert hub.headers_asked() == [API + INDEX, "/me/gpt/resolve/main/model.safetensors"]


def test_inspect_of_stored_parameters_reads_no_configuration(hub: Hub) -> None:
    ingot.inspect(f"hf://me/gpt/{INDEX}", count="stored")
    ingot.inspect(f"hf://me/gpt/{INDEX}", config={})
    assert hub.asked() == [API + INDEX] * 2


def test_inspect_reads_pages_of_the_hub(hub: Hub) -> None:
    check(ingot.inspect(hub.server.url("/me/gpt")), SHARDS)
    check(ingot.inspect(hub.server.url(f"/me/gpt/blob/main/{INDEX}")), SHARDS)
    assert all(path.startswith((API, "/me/gpt/resolve/main/")) for path in hub.asked())


def test_inspect_reads_the_configuration_of_a_folder(hub: Hub) -> None:
    files = files_of(SHARDS)
    hub.files = {f"a b/{name}": data for name, data in files.items()}
    hub.documents = {f"a b/{INDEX}": json.dumps(document_of(files)).encode()}
    check(ingot.inspect(f"hf://me/gpt/a b/{INDEX}"), SHARDS)
    assert sorted(hub.asked()) == [API + f"a b/{INDEX}", "/me/gpt/resolve/main/a b/config.json"]


def test_inspect_prefers_one_file_to_an_index(hub: Hub) -> None:
    # As in safe_open and huggingface_hub.
    hub.files |= files_of(SINGLE[0])
    found = ingot.inspect("hf://me/gpt", config={})
    assert (found.sharded, list(found.files_metadata)) == (False, ["model.safetensors"])
    assert found.parameter_count == SINGLE[0]["logical"]


def test_inspect_offline_requests_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        ingot.inspect("hf://me/gpt")
    (case,) = [case for case in SINGLE if case["name"] == "mxfp4"]
    repo = tmp_path / "home" / "hub" / "models--me--gpt"
    write(repo / "snapshots" / COMMIT, files_of(case))
    write(repo / "refs", {"main": COMMIT.encode()})
    check(ingot.inspect("hf://me/gpt"), case)
    assert hub.asked() == []


# Invalid answers


@cases(
    "source",
    ["hf://me/gpt", f"hf://me/gpt@{COMMIT}", f"hf://me/gpt/{INDEX}"],
    ids=["repository", "commit", "index"],
)
def test_inspect_without_the_document_reads_the_shards(hub: Hub, source: str) -> None:
    hub.documents = {}
    check(ingot.inspect(source), SHARDS)
    shards = [path for path in hub.headers_asked() if "-of-" in path]
    assert len(shards) == len(SHARDS["files"])
    assert len(hub.headers_asked()) <= len(shards) + 3


def broken_documents() -> dict[str, bytes]:
    """Return invalid documents, which must not be used."""
    good = document_of(files_of(SHARDS))
    first, second = good["headers"]
    (name, entry), *_ = ((name, entry) for name, entry in good["headers"][first].items() if name[0] != "_")

    def with_headers(headers: dict[str, Any]) -> bytes:
        return json.dumps({**good, "headers": headers}).encode()

    def with_entry(**changes: Any) -> bytes:
        return with_headers({**good["headers"], first: {name: {**entry, **changes}}})

    return {
        "empty": b"",
        "no json": b"<html>",
        "no headers": b'{"index": {}}',
        "no shards": with_headers({}),
        "a name that leads elsewhere": with_headers({"../a.safetensors": good["headers"][first]}),
        "a tensor in two shards": with_headers(dict.fromkeys((first, second), good["headers"][first])),
        "an unknown dtype": with_entry(dtype="Q9"),
        "a size that is wrong": with_entry(data_offsets=[0, 7]),
        "a hole": with_entry(data_offsets=[8, 8 + entry["data_offsets"][1]]),
        "a negative size": with_entry(shape=[-1]),
    }


@cases("document", broken_documents().values(), ids=broken_documents())
def test_inspect_rejects_an_invalid_document(hub: Hub, document: bytes) -> None:
    hub.documents[INDEX] = document
    check(ingot.inspect(f"hf://me/gpt/{INDEX}"), SHARDS)
    assert hub.headers_asked()[0] == API + INDEX


def test_inspect_rejects_an_unreadable_configuration_without_secrets(hub: Hub) -> None:
    hub.files["config.json"] = b"[]"
    with pytest.raises(ingot.CheckpointError, match="is not a JSON object") as caught:
        ingot.inspect(f"hf://me/gpt/{INDEX}")
    assert str(caught.value).startswith("hf://me/gpt/config.json: ")
    hub.files |= files_of(SINGLE[0])
    url = hub.other.url("/plain/model.safetensors?signature=x").replace("//", "//me:sesame@")
    with pytest.raises(ingot.CheckpointError, match="is not a JSON object") as caught:
        ingot.inspect(url)
    assert str(caught.value).startswith(hub.other.url("/plain/config.json?…: "))
    hub.files["config.json"] = b" " * 10_000_001
    with pytest.raises(ingot.StorageError, match="too large: expected at most 10000000 bytes") as large:
        ingot.inspect(url)
    assert large.value.code == "document-too-large"
    for fault in (caught.value, large.value):
        assert "sesame" not in str(fault)
        assert "signature" not in str(fault)
    assert ingot.inspect(url, config={}).parameter_count == SINGLE[0]["logical"]


def test_inspect_of_a_missing_model_is_file_not_found(hub: Hub) -> None:
    hub.files, hub.documents = {}, {}
    with pytest.raises(FileNotFoundError):
        ingot.inspect("hf://me/gpt")
    with pytest.raises(ingot.OptionError):
        ingot.inspect("hf://me/gpt", storage_options={"retries": 1, "timeout": -1})


def test_inspect_rejects_a_header_over_the_limit(hub: Hub) -> None:
    hold(hub, SINGLE[0])
    with pytest.raises(ingot.HeaderError, match="header too large"):
        ingot.inspect("hf://me/gpt", max_header_size=10)


# Async


def test_inspect_async_runs_many_at_once(hub: Hub) -> None:
    pause = threading.Barrier(4, timeout=60)

    def answer(handler: Handler, request: Request) -> None:
        if request.path.startswith(API):
            # No request continues before all have arrived.
            pause.wait()
        hub.answer(handler, request)

    async def several(url: str) -> list[ingot.RepoMetadata]:
        source = f"{url}/me/gpt/blob/main/{INDEX}"
        calls = (ingot.inspect_async(source, config={}, storage_options={"endpoint": url}) for _ in range(4))
        return await asyncio.gather(*calls)

    with serving(answer) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url(""))
        assert len(asyncio.run(several(server.url("")))) == 4


@cases("count", ["logical", "stored"])
def test_inspect_async_leaves_no_request_when_cancelled(
    hub: Hub, count: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, over = threading.Event(), threading.Event()

    def answer(handler: Handler, request: Request) -> None:
        reached.set()
        over.wait(30)

    async def cancelled() -> None:
        task = asyncio.create_task(ingot.inspect_async("hf://me/gpt", count=count))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(answer) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url(""))
        # The call ends although the server never answers. `asyncio.run` waits for its threads.
        begun = time.monotonic()
        asyncio.run(cancelled())
        assert time.monotonic() - begun < 20
        over.set()
