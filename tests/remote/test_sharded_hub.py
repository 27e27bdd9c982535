"""Sharded models of an imitated Hub: all files of a model are of one commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.hubs import NEAR, Hub, fill_cache, imitated, sha256
from support.shards import INDEX, NAMES, checkpoint, files_in, same, tensors

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with imitated({OLD: checkpoint(0), NEW: checkpoint(1)}, tmp_path, monkeypatch) as hub:
        yield hub


def fill_the_cache(home: Path, commit: str = OLD, seed: int = 0, without: str | None = None) -> Path:
    """Write the repository as the Hub's clients cache it, and return the index."""
    return fill_cache(home, commit, checkpoint(seed), without) / INDEX


def test_hub_repository_of_shards_is_a_checkpoint(hub: Hub) -> None:
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert sorted(hub.names()) == ["main/model.safetensors", f"main/{INDEX}"]
    assert (file.path, file.backend) == (f"hf://me/gpt/{INDEX}", "hf")
    assert file.shards == [f"hf://me/gpt@{OLD}/{name}" for name in NAMES]
    assert same(file.get_tensors())
    # The other host did not receive the token.
    assert all("authorization" not in request.headers for request in hub.cdn.requests)


def test_hub_requests_model_and_index_at_once(hub: Hub) -> None:
    together = threading.Barrier(2)
    # Neither is answered before both wait.
    hub.asked = lambda name: together.wait(timeout=30)
    assert len(ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)) == len(tensors())
    assert len(hub.hub.requests) == 2


def test_hub_prefers_one_file_to_its_index(hub: Hub) -> None:
    one = {"one": np.arange(5)}
    hub.commits[OLD]["model.safetensors"] = ingot.numpy.save(one)
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert (file.keys(), file.path) == (["one"], "hf://me/gpt")


def test_hub_names_both_files_for_a_missing_tensor(hub: Hub) -> None:
    del hub.commits[OLD][INDEX]
    with pytest.raises(FileNotFoundError, match=f"nor is there a file {INDEX}") as caught:
        ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert "model.safetensors)" in str(caught.value)
    assert caught.value.filename == "hf://me/gpt"


@pytest.mark.parametrize("page", ["", "/tree/main", "/tree/main/", f"/blob/main/{INDEX}", "/tree/" + OLD])
def test_hub_pages_of_the_repository_are_the_model(hub: Hub, page: str) -> None:
    assert same(ingot.numpy.load_file(hub.hub.url(f"/me/gpt{page}"), storage_options=NEAR))


def test_hub_page_of_a_folder_is_its_model(hub: Hub) -> None:
    hub.commits[OLD] = {f"unet/{name}": data for name, data in checkpoint().items()}
    file = ingot.safe_open(hub.hub.url("/me/gpt/tree/main/unet"), "np", storage_options=NEAR)
    assert same(file.get_tensors())
    assert file.shards[0] == f"hf://me/gpt@{OLD}/unet/{NAMES[0]}"


@pytest.mark.parametrize("url", ["hf://me/gpt", f"hf://me/gpt/{INDEX}"])
def test_hub_shards_have_the_commit_of_the_index(hub: Hub, url: str) -> None:
    file = ingot.safe_open(url, "np", storage_options=NEAR)
    assert np.array_equal(file["layers.0.bias"], tensors(0)["layers.0.bias"])
    # Someone pushes another version while the file is open.
    hub.main = NEW
    assert same(file.get_tensors(), 0)
    asked = [name.split("/")[0] for name in hub.names() if name.endswith(".safetensors")]
    assert set(asked) - {"main"} == {OLD}
    assert [name for name in hub.names() if name.startswith("main/") and NAMES[0] in name] == []
    assert same(ingot.numpy.load_file(url, storage_options=NEAR), 1)


def test_hub_headers_take_one_request_each(hub: Hub) -> None:
    file = ingot.safe_open(f"hf://me/gpt/{INDEX}", "np", storage_options=NEAR)
    file.parameter_count()
    assert len(hub.hub.requests) == 1 + len(NAMES)
    assert len(hub.cdn.requests) == len(NAMES)


def test_hub_missing_shard_is_named(hub: Hub) -> None:
    del hub.commits[OLD][NAMES[2]]
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    with pytest.raises(FileNotFoundError, match="Entry not found") as caught:
        file.parameter_count()
    assert caught.value.filename == f"hf://me/gpt@{OLD}/{NAMES[2]}"


def test_hub_shards_in_the_cache_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    index = fill_the_cache(tmp_path)
    file = ingot.safe_open("hf://me/gpt", "np", storage_options=NEAR)
    assert (file.path, file.backend) == (str(index), "mmap")
    assert "cache" in file.why
    assert same(file.get_tensors())
    # The two requests found the commit of the branch.
    assert len(hub.hub.requests) == 2
    pinned = ingot.safe_open(f"hf://me/gpt@{OLD}", "np", storage_options=NEAR)
    assert same(pinned.get_tensors())
    assert (len(hub.hub.requests), len(hub.cdn.requests)) == (2, 0)


def test_hub_cache_of_another_commit_is_not_used(hub: Hub, tmp_path: Path) -> None:
    fill_the_cache(tmp_path, NEW, 1)
    assert same(ingot.numpy.load_file("hf://me/gpt", storage_options=NEAR), 0)


@pytest.mark.parametrize("revision", ["", f"@{OLD}"])
def test_hub_shard_that_the_cache_lacks_is_fetched(hub: Hub, tmp_path: Path, revision: str) -> None:
    index = fill_the_cache(tmp_path, without=NAMES[1])
    file = ingot.safe_open(f"hf://me/gpt{revision}", "np", storage_options=NEAR)
    assert same(file.get_tensors())
    assert file.path == str(index)
    assert file.shards[1] == f"hf://me/gpt@{OLD}/{NAMES[1]}"
    assert {request.path.partition("?")[0].split("/")[-1] for request in hub.cdn.requests} == {NAMES[1]}


def test_hub_checkpoint_offline_reads_the_cache_only(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        ingot.safe_open("hf://me/gpt", "np")
    fill_the_cache(tmp_path)
    assert same(ingot.numpy.load_file("hf://me/gpt"))
    (tmp_path / "hub/models--me--gpt/snapshots" / OLD / NAMES[1]).unlink()
    with pytest.raises(FileNotFoundError, match=NAMES[1]):
        ingot.safe_open(f"hf://me/gpt@{OLD}", "np")
    assert hub.hub.requests == []


# Downloads


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the folder of downloads, outside the cache."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


@pytest.mark.parametrize("source", ["hf://me/gpt", f"hf://me/gpt/{INDEX}", f"hf://me/gpt@{OLD}"])
def test_hub_download_keeps_all_shards(hub: Hub, place: Path, source: str) -> None:
    done = ingot.download(source, place, storage_options=NEAR)
    assert files_in(place) == checkpoint()
    assert done.path == str(place / INDEX)
    assert [file.sha256 for file in done.files] == [*(sha256(checkpoint()[name]) for name in NAMES), None]
    assert all("authorization" not in request.headers for request in hub.cdn.requests)
    with pytest.raises(FileExistsError) as caught:
        ingot.download(source, place, storage_options=NEAR)
    assert caught.value.filename == str(place / INDEX)


def test_hub_download_prefers_one_file_to_its_index(hub: Hub, place: Path) -> None:
    hub.commits[OLD]["model.safetensors"] = b"one"
    (place / INDEX).write_text("of another")
    assert ingot.download("hf://me/gpt", place, storage_options=NEAR).path == str(place / "model.safetensors")
    with pytest.raises(FileExistsError):
        ingot.download("hf://me/gpt", place, storage_options=NEAR)


def test_hub_download_is_of_one_commit(hub: Hub, place: Path) -> None:
    def push(name: str) -> None:
        if name == NAMES[0]:
            hub.main = NEW

    hub.asked = push
    ingot.download("hf://me/gpt", place, storage_options=NEAR)
    assert files_in(place) == checkpoint(0)


def broken_off(hub: Hub, place: Path) -> None:
    """Download all but the last shard, and fail."""
    total = sum(len(data) for data in checkpoint().values())

    def progress(done: int, _: int) -> None:
        if done >= total - len(checkpoint()[NAMES[2]]):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        ingot.download("hf://me/gpt", place, storage_options=NEAR, threads=1, progress=progress)
    assert not any((place / name).exists() for name in checkpoint())


def test_hub_download_resumes_across_commits(hub: Hub, place: Path) -> None:
    hub.commits[NEW] = {**checkpoint(1), NAMES[0]: checkpoint(0)[NAMES[0]]}
    broken_off(hub, place)
    hub.main = NEW
    done = ingot.download("hf://me/gpt", place, storage_options=NEAR)
    assert files_in(place) == hub.commits[NEW]
    assert [file.fetched == 0 for file in done.files] == [True, False, False, False]


def test_hub_download_rejects_a_shard_with_another_digest(hub: Hub, place: Path) -> None:
    hub.claims[NAMES[1]] = "ab" * 32
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.download("hf://me/gpt", place, storage_options=NEAR)
    assert caught.value.path == f"hf://me/gpt@{OLD}/{NAMES[1]}"
    assert (caught.value.expected, caught.value.found) == ("ab" * 32, sha256(checkpoint()[NAMES[1]]))
    assert sorted(files_in(place)) == sorted(
        [f".{NAMES[0]}.ingot-part", "more/." + NAMES[2].removeprefix("more/") + ".ingot-part"]
    )
    hub.claims.clear()
    done = ingot.download("hf://me/gpt", place, storage_options=NEAR)
    assert files_in(place) == checkpoint()
    assert [file.fetched == 0 for file in done.files] == [True, False, True, False]


def test_hub_download_copies_from_the_cache(hub: Hub, tmp_path: Path, place: Path) -> None:
    fill_the_cache(tmp_path)
    done = ingot.download(f"hf://me/gpt@{OLD}", place, storage_options=NEAR)
    assert files_in(place) == checkpoint()
    assert not any((place / name).is_symlink() for name in checkpoint())
    assert (done.fetched, hub.hub.requests) == (0, [])


def test_hub_download_fetches_what_the_cache_lacks(hub: Hub, tmp_path: Path, place: Path) -> None:
    fill_the_cache(tmp_path, without=NAMES[1])
    done = ingot.download(f"hf://me/gpt@{OLD}", place, storage_options=NEAR)
    assert files_in(place) == checkpoint()
    assert done.fetched == len(checkpoint()[NAMES[1]])
