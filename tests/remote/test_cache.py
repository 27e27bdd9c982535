"""The cache of remote files: which bytes come from the store, which from the disk, and that none is wrong."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import _native
from support import hubs, shards, stores
from support.cached_loads import Loaders
from support.record import note
from support.servers import Answer, Handler, Request, Server, good, serving
from support.small_disk import small_disk

MIB = 1 << 20
BLOCK = 8 * MIB
#: Bytes of the request that opens a file.
START = 128 << 10
#: Rounds of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_CACHED_LOADS", "3"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)


def content(version: int, nbytes: int = BLOCK + 3 * MIB) -> dict[str, np.ndarray]:
    """Return tensors whose bytes differ between versions everywhere."""
    row = np.random.default_rng(version).integers(0, 255, 4099, np.uint8)
    return {"a": np.resize(row, nbytes - 70_001), "b": np.resize(row, 70_001)}


TENSORS = content(0)
DATA = ingot.numpy.save(TENSORS)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(good(DATA)) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, object]:
    return {"cache_dir": tmp_path / "cache", "retries": 0}


@pytest.fixture(scope="module")
def loaders() -> Iterator[Loaders]:
    with Loaders(4) as loaders:
        yield loaders


def load(server: Server, options: dict[str, object], **more: object) -> dict[str, np.ndarray]:
    return ingot.numpy.load_file(server.url(), storage_options={**options, **more})


def is_right(found: dict[str, np.ndarray], expected: dict[str, np.ndarray] = TENSORS) -> bool:
    return all(np.array_equal(found[name], expected[name]) for name in expected)


def blocks(options: dict[str, object]) -> list[Path]:
    return sorted(Path(str(options["cache_dir"])).glob("blocks/*/*-??????"))


def asked(server: Server) -> int:
    """Return the bytes that were requested."""
    ranges = [request.range for request in server.requests if "range" in request.headers]
    return sum(end - begin for begin, end in ranges)


def test_second_load_requests_the_start_only(server: Server, cache: dict[str, object]) -> None:
    assert is_right(load(server, cache))
    assert asked(server) == len(DATA)
    before, count = asked(server), len(server.requests)
    assert is_right(load(server, cache))
    assert len(server.requests) == count + 1
    assert asked(server) - before == START
    assert blocks(cache)[0].stat().st_size == BLOCK + 512


def test_cache_is_private_and_marked(server: Server, cache: dict[str, object]) -> None:
    load(server, cache)
    folder = Path(str(cache["cache_dir"]))
    if os.name != "nt":
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in [folder, *folder.glob("*/")])
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert not any("model" in path.name for path in folder.rglob("*"))


def test_environment_names_the_cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    load(server, {})
    assert len(blocks({"cache_dir": tmp_path / "cache"})) == 2
    before = asked(server)
    load(server, {"cache_dir": False})
    assert asked(server) - before >= len(DATA)
    monkeypatch.setenv("INGOT_CACHE_SIZE", "much")
    with pytest.raises(ingot.OptionError, match="INGOT_CACHE_SIZE: expected a size such as 500GB"):
        load(server, {})


def test_load_records_the_use_of_all_its_files(server: Server, cache: dict[str, object]) -> None:
    load(server, cache)
    files = [path for path in Path(str(cache["cache_dir"])).glob("blocks/*/*") if path.is_file()]
    assert len(files) == 3
    for offline in (False, True):
        for path in files:
            os.utime(path, (0, 0))
        assert is_right(load(server, cache, offline=offline))
        assert all(path.stat().st_mtime > 0 for path in files)


def test_slice_fetches_the_block_that_has_it(server: Server, cache: dict[str, object]) -> None:
    options = {"storage_options": cache}
    with ingot.safe_open(server.url(), "numpy", **options) as file:  # type: ignore[arg-type]
        rows = file.get_slice("a")[BLOCK + MIB : BLOCK + MIB + 10]
        assert np.array_equal(rows, TENSORS["a"][BLOCK + MIB : BLOCK + MIB + 10])
        count = len(server.requests)
        file.get_slice("a")[BLOCK + MIB : BLOCK + 2 * MIB]
    assert len(server.requests) == count
    assert [path.name[-1] for path in blocks(cache)] == ["1"]


def test_two_versions_are_kept_apart(server: Server, cache: dict[str, object]) -> None:
    load(server, cache)
    other = content(1)
    server.replace(good(ingot.numpy.save(other), ETag='"v2"'))
    assert is_right(load(server, cache), other)
    server.replace(good(DATA))
    before = asked(server)
    assert is_right(load(server, cache))
    assert asked(server) - before < MIB


def test_file_replaced_while_it_is_read_is_an_error(server: Server, cache: dict[str, object]) -> None:
    with ingot.safe_open(server.url(), "numpy", storage_options=cache) as file:
        file.get_slice("a")[:10]
        server.replace(good(ingot.numpy.save(content(1)), ETag='"v2"'))
        with pytest.raises(ingot.SafetensorError, match="replaced"):
            file["a"]


@pytest.mark.parametrize(
    "tag", [{"ETag": 'W/"v1"'}, {"ETag": "", "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}]
)
def test_file_without_a_strong_tag_is_not_cached(
    server: Server, cache: dict[str, object], tag: dict[str, str]
) -> None:
    server.replace(good(DATA, **tag))
    for _ in range(2):
        before = asked(server)
        assert is_right(load(server, cache))
        assert asked(server) - before >= len(DATA)
    assert blocks(cache) == []


def test_server_with_one_tag_for_two_contents_is_not_cached(server: Server, cache: dict[str, object]) -> None:
    load(server, cache)
    other = {"a": content(1)["a"], "c": content(1)["b"]}
    server.replace(good(ingot.numpy.save(other)))
    assert is_right(load(server, cache), other)
    assert "one ETag for two contents" in str(_native.why_uncached())


def test_urls_that_differ_in_their_signature_are_one_file(server: Server, cache: dict[str, object]) -> None:
    def read(query: str) -> int:
        before = asked(server)
        ingot.numpy.load_file(server.url(f"/model.safetensors?{query}"), storage_options=cache)
        return asked(server) - before

    read("X-Amz-Signature=1&X-Amz-Date=1")
    assert read("X-Amz-Signature=2&X-Amz-Date=2") < MIB
    assert read("X-Amz-Signature=2&part=2") >= len(DATA)


def guarded(handler: Handler, request: Request) -> None:
    if request.headers.get("authorization") == "Bearer right":
        good(DATA)(handler, request)
    else:
        handler.head(403, Content_Length=0)


def test_identity_is_checked_before_a_hit(server: Server, cache: dict[str, object]) -> None:
    server.replace(guarded)
    assert is_right(load(server, cache, token="right"))
    with pytest.raises(PermissionError):
        load(server, cache, token="wrong")


def test_headers_of_another_process_do_not_pass_the_check(server: Server, cache: dict[str, object]) -> None:
    server.replace(guarded)
    url, known = server.url(), {**cache, "token": "right"}
    load(server, known)
    headers = _native.Checkpoint.open_url(url, known).shard_headers()
    assert headers is not None
    count = len(server.requests)
    for token in ("wrong", "right"):
        opened = _native.Checkpoint.open_url_with(url, {**cache, "token": token}, headers)
        assert len(server.requests) == count
        with pytest.raises(ingot.StorageError, match="403") if token == "wrong" else nullcontext():
            assert opened.tensor_bytes("a", BLOCK, BLOCK + 9) == TENSORS["a"][BLOCK : BLOCK + 9].tobytes()
        count += 1
        assert len(server.requests) == count


@pytest.mark.parametrize("how", ["byte", "truncated", "swapped", "empty", "longer"])
def test_damaged_block_is_fetched_again(server: Server, cache: dict[str, object], how: str) -> None:
    load(server, cache)
    first = blocks(cache)[0]
    data = first.read_bytes()
    if how == "swapped":
        server.replace(good(ingot.numpy.save(content(1)), ETag='"v2"'))
        load(server, cache)
        server.replace(good(DATA))
        [second] = [path for path in blocks(cache)[::2] if path != first]
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    else:
        bad = {
            "byte": data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
            "truncated": data[:-1],
            "empty": b"",
            "longer": data + b"x",
        }
        first.write_bytes(bad[how])
    before = asked(server)
    assert is_right(load(server, cache))
    assert 0 < asked(server) - before <= 2 * BLOCK + MIB
    before = asked(server)
    assert is_right(load(server, cache))
    assert asked(server) - before < MIB


def test_offline_reads_what_the_cache_has(
    server: Server, cache: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(server, cache)
    count = len(server.requests)
    assert is_right(load(server, cache, offline=True))
    monkeypatch.setenv("INGOT_OFFLINE", "1")
    assert is_right(load(server, cache))
    blocks(cache)[1].unlink()
    with pytest.raises(ingot.SafetensorError, match="requests are forbidden") as caught:
        load(server, cache)
    assert caught.value.code == "offline"
    with pytest.raises(FileNotFoundError, match="requests are forbidden"):
        ingot.open(server.url("/other.safetensors"), storage_options=cache)
    with pytest.raises(FileNotFoundError, match="requests are forbidden"):
        ingot.open(server.url(), storage_options={"cache_dir": False})
    assert len(server.requests) == count


def test_offline_reads_shards_of_the_hub_from_the_cache(
    tmp_path: Path, cache: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hubs.imitated({"c" * 40: shards.checkpoint()}, tmp_path / "home", monkeypatch) as hub:
        assert hub.hub is not None
        options = {**cache, **hubs.NEAR}
        assert shards.same(ingot.numpy.load_file("hf://me/gpt", storage_options=options))
        count = len(hub.hub.requests)
        options["offline"] = True
        assert shards.same(ingot.numpy.load_file("hf://me/gpt", storage_options=options))
        assert len(hub.hub.requests) == count


def test_stores_are_cached(cache: dict[str, object]) -> None:
    pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")
    with stores.running() as store:
        options = {**store.options, **cache}
        url = "s3://b/k.safetensors"
        ingot.numpy.save_file(TENSORS, url, storage_options=store.options)
        assert is_right(ingot.numpy.load_file(url, storage_options=options))
        before = asked(store.server)
        assert is_right(ingot.numpy.load_file(url, storage_options=options))
        assert asked(store.server) - before == START


def test_cache_evicts_the_blocks_that_were_used_first(server: Server, cache: dict[str, object]) -> None:
    def total() -> int:
        return sum(path.stat().st_size for path in Path(str(cache["cache_dir"])).glob("blocks/*/*"))

    for number in range(3):
        tensors = content(number, BLOCK + MIB)
        server.replace(good(ingot.numpy.save(tensors), ETag=f'"{number}"'))
        assert is_right(load(server, cache, cache_size="20MB"), tensors)
        assert total() <= 20_000_000
    before = asked(server)
    load(server, cache, cache_size="20MB")
    assert asked(server) - before < MIB, "the last version is cached"


def test_model_larger_than_the_cache_is_cached_in_part(server: Server, cache: dict[str, object]) -> None:
    size, large = 2 * BLOCK + MIB, content(2, 3 * BLOCK - MIB)
    server.replace(good(ingot.numpy.save(large)))
    assert is_right(load(server, cache, cache_size=size), large)
    assert len(blocks(cache)) == 2
    assert "cache_size is smaller than the files in use" in str(_native.why_uncached())
    before = asked(server)
    assert is_right(load(server, cache, cache_size=size), large)
    assert asked(server) - before < BLOCK + MIB, "two of three blocks come from the cache"


def test_full_disk_is_a_note(server: Server, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 6) as disk:
        options: dict[str, object] = {"cache_dir": disk / "cache"}
        for _ in range(2):
            assert is_right(load(server, options))
        with ingot.safe_open(server.url(), "numpy", storage_options=options) as file:
            assert "the cache is not used: " in file.why
            assert str(disk) in file.why
        assert list(disk.rglob("*.part")) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root may mount")
def test_read_only_cache_is_used(server: Server, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        options: dict[str, object] = {"cache_dir": disk / "cache"}
        load(server, options)
        blocks(options)[1].unlink()
        assert os.system(f"mount -o remount,ro {disk}") == 0
        before = asked(server)
        assert is_right(load(server, options))
        assert 2 * MIB < asked(server) - before < 4 * MIB
        assert "ead-only" in str(_native.why_uncached())


@pytest.mark.skipif(os.name == "nt", reason="Windows has access lists")
def test_directory_that_others_can_write_to_is_not_used(server: Server, cache: dict[str, object]) -> None:
    folder = Path(str(cache["cache_dir"]))
    folder.mkdir()
    folder.chmod(0o777)
    assert is_right(load(server, cache))
    assert list(folder.iterdir()) == []
    assert "others can write to it" in str(_native.why_uncached())


def slowly(data: bytes, arrived: threading.Event, go_on: threading.Event) -> Answer:
    """Return the answer of a server that stops within the first block until `go_on`."""

    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        if (begin == 0 and end <= MIB) or begin >= BLOCK:
            good(data)(handler, request)
            return
        usual = {"Content_Range": f"bytes {begin}-{end - 1}/{len(data)}", "Content_Length": end - begin}
        handler.head(206, ETag='"v1"', **usual)
        handler.body(data[begin : begin + MIB])
        arrived.set()
        go_on.wait(60)
        handler.body(data[begin + MIB : end])

    return answer


def test_killed_process_leaves_its_block_to_others(
    server: Server, cache: dict[str, object], loaders: Loaders
) -> None:
    arrived, go_on = threading.Event(), threading.Event()
    server.replace(slowly(DATA, arrived, go_on))
    loaders.begin(0, server.url(), cache)
    assert arrived.wait(60)
    loaders.kill(0)
    go_on.set()
    server.replace(good(DATA))
    assert is_right(load(server, cache))
    assert loaders.end(0) is None
    assert list(Path(str(cache["cache_dir"])).rglob("*.part")) == []


def test_process_that_waits_for_a_stopped_one_reads_from_the_store(
    server: Server, cache: dict[str, object], loaders: Loaders
) -> None:
    arrived, go_on = threading.Event(), threading.Event()
    server.replace(slowly(DATA, arrived, go_on))
    loaders.begin(0, server.url(), cache)
    assert arrived.wait(60)
    server.replace(good(DATA))
    assert is_right(load(server, cache, stall_timeout=0.3))
    assert "another process has stopped" in str(_native.why_uncached())
    go_on.set()
    assert loaders.end(0) == loaders.digest(TENSORS)


def test_four_processes_fetch_each_block_once(
    server: Server, cache: dict[str, object], loaders: Loaders
) -> None:
    for number in range(4):
        loaders.begin(number, server.url(), cache)
    assert {loaders.end(number) for number in range(4)} == {loaders.digest(TENSORS)}
    assert asked(server) <= len(DATA) + 4 * START


def damage(folder: Path, chance: random.Random) -> str:
    """Do to the files of a cache what a crash, a bad disk or a person may do."""
    found = sorted(folder.glob("blocks/*/*"))
    how = chance.choice(("nothing", "byte", "truncated", "swapped", "removed", "all removed", "torn"))
    if not found or how == "nothing":
        return "nothing"
    one, other = chance.choice(found), chance.choice(found)
    try:
        if how == "byte":
            with one.open("r+b") as file:
                file.seek(chance.randrange(max(1, one.stat().st_size)))
                byte = file.read(1) or b"\0"
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ (1 << chance.randrange(8))]))
        elif how == "truncated":
            os.truncate(one, chance.randrange(one.stat().st_size + 1))
        elif how == "torn":
            # As after a power loss: the size is right, and the last pages are zeros.
            size = one.stat().st_size
            os.truncate(one, chance.randrange(size + 1))
            os.truncate(one, size)
        elif how == "swapped":
            spare = folder / "spare"
            one.rename(spare)
            other.rename(one) if other != one else None
            spare.rename(other)
        elif how == "removed":
            one.unlink()
        else:
            shutil.rmtree(folder)
    except OSError:
        # A process removed it or wrote another file meanwhile.
        pass
    return how


def test_no_fault_changes_a_byte(tmp_path: Path, loaders: Loaders) -> None:
    chance = random.Random(SEED)
    cache: dict[str, object] = {"cache_dir": tmp_path / "cache", "retries": 2}
    versions = [content(version, chance.randrange(1, 2 * BLOCK + MIB) + 100_000) for version in range(3)]
    data = [ingot.numpy.save(tensors) for tensors in versions]
    wrong, failed, killed = 0, 0, 0
    with serving(good(data[0], ETag='"0"')) as server:
        right = [loaders.digest(tensors) for tensors in versions]
        for _ in range(ROUNDS):
            version = chance.randrange(len(versions))
            server.replace(good(data[version], ETag=f'"{version}"'))
            size = chance.choice((None, None, "9MB", "20MB", "40MB"))
            for number in range(4):
                loaders.begin(number, server.url(), {**cache, "cache_size": size})
            damage(tmp_path / "cache", chance)
            if chance.random() < 0.3:
                loaders.wait(chance.random() * 0.05)
                loaders.kill(chance.randrange(4))
                killed += 1
            damage(tmp_path / "cache", chance)
            for number in range(4):
                found = loaders.end(number)
                failed += found is not None and found.startswith("error")
                wrong += found not in (None, right[version])
    note("loads through a cache with faults", ROUNDS, wrong, seed=SEED, failed=failed, killed=killed)
    assert wrong == 0, f"seed {SEED}"
