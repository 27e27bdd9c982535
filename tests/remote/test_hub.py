"""Files of an imitated Hub: names, tokens, redirects to another host, and the cache of the Hub's clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.hubs import NEAR, Hub, fill_cache, imitated, sha256
from support.servers import serving

TENSORS = {"a": np.arange(300_000), "b": np.float32(1.5)}
DATA = ingot.numpy.save(TENSORS)
FILES = {"model.safetensors": DATA}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with imitated({COMMIT: FILES}, tmp_path, monkeypatch) as hub:
        yield hub


def test_hub_file_is_opened_by_name(hub: Hub) -> None:
    file = ingot.safe_open("hf://me/gpt/model.safetensors", "np", storage_options=NEAR)
    assert (file.path, file.backend) == ("hf://me/gpt/model.safetensors", "hf")
    assert (len(hub.hub.requests), len(hub.cdn.requests)) == (1, 1)
    assert np.array_equal(file["a"], TENSORS["a"])
    # The bytes are requested at the target of the first redirect, which received no token.
    assert len(hub.hub.requests) == 1
    assert all("authorization" not in request.headers for request in hub.cdn.requests)
    assert all("if-match" in request.headers for request in hub.cdn.requests[1:])


def test_hub_repository_is_its_model(hub: Hub) -> None:
    assert ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR).keys() == ["a", "b"]


@pytest.mark.parametrize("kind", ["blob", "resolve", "raw"])
def test_hub_page_is_its_file(hub: Hub, kind: str) -> None:
    url = hub.hub.url(f"/me/gpt/{kind}/main/model.safetensors?download=true")
    file = ingot.safe_open(url, "np", storage_options=NEAR)
    assert file.backend == "hf"
    assert np.array_equal(file["a"], TENSORS["a"])


def test_hub_finds_a_renamed_repository(hub: Hub) -> None:
    assert len(ingot.safe_open("hf://me/old", "np", storage_options=NEAR)) == 2


def test_hub_refreshes_an_expired_address(hub: Hub) -> None:
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    hub.signature = 2
    assert np.array_equal(file["a"], TENSORS["a"])
    assert len(hub.hub.requests) >= 2


def test_hub_errors_have_the_words_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="Entry not found") as missing:
        ingot.safe_open("hf://me/gpt/other.safetensors", "np", storage_options=NEAR)
    assert missing.value.filename == "hf://me/gpt/other.safetensors"
    assert hub.hub.url("") in str(missing.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PermissionError, match="is restricted") as refused:
        ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert "hf_wrong" not in str(refused.value)


def test_hub_token_can_be_given_and_withheld(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError):
        ingot.safe_open("hf://me/gpt", "np", storage_options={**NEAR, "token": False})
    assert "authorization" not in hub.hub.requests[-1].headers
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert len(ingot.safe_open("hf://me/gpt", "np", storage_options={**NEAR, "token": "hf_right"})) == 2


def test_hub_token_is_sent_to_no_other_url(hub: Hub) -> None:
    with serving(lambda handler, request: handler.part(DATA, request)) as other:
        ingot.safe_open(other.url(), "np")
        assert "authorization" not in other.requests[0].headers


def test_hub_file_in_the_cache_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    path = fill_cache(tmp_path, COMMIT, FILES) / "model.safetensors"
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert (file.path, file.backend) == (str(path), "mmap")
    assert "cache" in file.why
    # The answer for either possible file of a model names the commit of the branch. Whether the other file
    # was requested by then depends on timing.
    asked = [request.path for request in hub.hub.requests]
    assert "/me/gpt/resolve/main/model.safetensors" in asked
    assert set(asked) <= {
        "/me/gpt/resolve/main/model.safetensors",
        "/me/gpt/resolve/main/model.safetensors.index.json",
    }
    assert len(asked) == len(set(asked))
    pinned = ingot.safe_open(f"hf://me/gpt@{COMMIT}", "np", storage_options=NEAR)
    assert np.array_equal(pinned["a"], TENSORS["a"])
    # Earlier requests may still arrive; no request names the cached commit.
    assert not [request for request in hub.hub.requests if COMMIT in request.path]


def test_hub_offline_reads_the_cache_only(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        ingot.safe_open("hf://me/gpt", "np")
    path = fill_cache(tmp_path, COMMIT, FILES) / "model.safetensors"
    assert ingot.safe_open("hf://me/gpt", "np").path == str(path)
    assert hub.hub.requests == []


def test_hub_file_is_sliced_and_loaded(hub: Hub) -> None:
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert file.get_slice("a")[1000:1010].tolist() == list(range(1000, 1010))
    found = ingot.numpy.load_file("hf://me/gpt", storage_options=NEAR)
    assert all(np.array_equal(found[name], TENSORS[name]) for name in TENSORS)
    assert ingot.inspect("hf://me/gpt", storage_options=NEAR).metadata is None


# Downloads


def test_hub_download_compares_the_digest_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    done = ingot.download("hf://me/gpt", tmp_path, storage_options=NEAR)
    assert done.path == str(tmp_path / "model.safetensors")
    assert done.sha256 == sha256(DATA)
    hub.claims["model.safetensors"] = "ab" * 32
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.download("hf://me/gpt", tmp_path / "other", storage_options=NEAR)
    assert caught.value.expected == "ab" * 32
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.download("hf://me/gpt", tmp_path / "other", expected_sha256="cd" * 32, storage_options=NEAR)
    assert (caught.value.expected, caught.value.found) == ("cd" * 32, "ab" * 32)
    assert not (tmp_path / "other").exists()


def test_hub_headers_of_another_server_are_ignored(tmp_path: Path) -> None:
    with serving(
        lambda handler, request: handler.part(DATA, request, X_Linked_Etag='"' + "ab" * 32 + '"')
    ) as other:
        assert ingot.download(other.url(), tmp_path / "x").sha256 is None


def test_hub_file_in_the_cache_is_copied(hub: Hub, tmp_path: Path) -> None:
    fill_cache(tmp_path, COMMIT, FILES)
    done = ingot.download(f"hf://me/gpt@{COMMIT}", tmp_path / "x", storage_options=NEAR)
    assert (tmp_path / "x").read_bytes() == DATA
    assert done.fetched == 0
    with pytest.raises(ingot.IntegrityError):
        ingot.download(f"hf://me/gpt@{COMMIT}", tmp_path / "y", expected_sha256="ab" * 32)
    assert hub.hub.requests == []
