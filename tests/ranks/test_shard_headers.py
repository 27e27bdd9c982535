"""Remote checkpoints are opened once: the first rank reads the index and the headers for all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ingot
import ingot.dcp
from ingot import StorageError
from ingot._native import Checkpoint
from ingot._read.door import PLAIN
from ingot._read.load import tensors as load_tensors
from ingot.torch import load_into, save_sharded
from ingot.torch._tensors import wrap
from support import slow_disk
from support.servers import Handler, Request, serving

TENSORS = {
    f"layers.{n}.weight": torch.arange(n, n + 64 * 256, dtype=torch.float32).view(64, 256) for n in range(9)
}


class Folder:
    """A server of the files of a folder, with one version."""

    def __init__(self, path: Path, tag: str = '"1"') -> None:
        self.path, self.tag = path, tag

    def __call__(self, handler: Handler, request: Request) -> None:
        handler.part((self.path / request.path[1:].partition("?")[0]).read_bytes(), request, ETag=self.tag)


@pytest.fixture(scope="module", params=["one file", "shards"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint: its index, or its only file."""
    folder = tmp_path_factory.mktemp("headers")
    save_sharded(TENSORS, folder, max_shard_size="200KB" if request.param == "shards" else "1GB")
    (first,) = folder.glob("*.json" if request.param == "shards" else "*.safetensors")
    return first


def target():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    return {
        name: distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)
        for name, tensor in zeros.items()
    }


def check(found):
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name].full_tensor(), tensor), name


def loads_into(source):
    tensors = target()
    load_into(tensors, source, read_once="job")
    check(tensors)


def loads_by_dcp(source):
    tensors = target()
    dcp.load(tensors, storage_reader=ingot.dcp.Reader(source, read_once="job"))
    check(tensors)


@pytest.mark.parametrize("loads", [loads_into, loads_by_dcp])
def test_shard_headers_are_requested_by_one_rank(four, saved, loads):
    with serving(Folder(saved.parent)) as server:
        four.run(loads, server.url(f"/{saved.name}"))
        asked = Counter(request.path for request in server.requests if request.range[0] == 0)
    # One request opens the file, and another one reads the bytes for the other ranks.
    assert {path: count for path, count in asked.items() if count > 2} == {}
    assert len(asked) == len([*saved.parent.iterdir()])


@pytest.mark.parametrize("loads", [loads_into, loads_by_dcp])
def test_shard_headers_of_one_rank_serve_a_slow_disk(four, saved, tmp_path, loads):
    if lacked := slow_disk.missing():
        pytest.skip(f"no FUSE mount: {lacked}")
    with slow_disk.mounted(saved.parent, tmp_path / "mount"):
        four.run(loads, str(tmp_path / "mount" / saved.name))


def renamed(headers):
    """Rename all tensors in shard headers. A rank with these names used the headers that it received."""
    index, files = headers
    files = [(nbytes, version, data.replace(b"layers.", b"LAYERS.")) for nbytes, version, data in files]
    return index and index.replace(b"layers.", b"LAYERS."), files


def test_shard_headers_that_are_known_are_not_read(saved, tmp_path):
    names = {name.replace("layers", "LAYERS") for name in TENSORS}
    with serving(Folder(saved.parent)) as server:
        headers = Checkpoint.open_url(server.url(f"/{saved.name}")).shard_headers()
        server.requests.clear()
        checkpoint = Checkpoint.open_url_with(server.url(f"/{saved.name}"), None, renamed(headers))
        assert {info.name for info in checkpoint.infos()} == names
        assert server.requests == []
    if lacked := slow_disk.missing():
        pytest.skip(f"no FUSE mount: {lacked}")
    with slow_disk.mounted(saved.parent, tmp_path / "mount"):
        path = tmp_path / "mount" / saved.name
        headers = Checkpoint.open(path).shard_headers()
        assert {info.name for info in Checkpoint.open_with(path, "auto", renamed(headers)).infos()} == names


def test_shard_headers_of_a_local_disk_are_read_by_each_rank(saved):
    with ingot.safe_open(saved, "pt") as file:
        assert file.backend == "mmap"
    assert Checkpoint.open(saved).shard_headers() is None


def test_shard_headers_of_another_version_are_read_again(saved, tmp_path):
    if lacked := slow_disk.missing():
        pytest.skip(f"no FUSE mount: {lacked}")
    with slow_disk.mounted(saved.parent, tmp_path / "mount"):
        path = tmp_path / "mount" / saved.name
        index, files = Checkpoint.open(path).shard_headers()
        files = [(nbytes, version, b"nonsense") for nbytes, version, _ in files]
        with pytest.raises(ingot.HeaderError):
            Checkpoint.open_with(path, "auto", (index, files)).infos()
        for others in (
            [(nbytes + 1, version, data) for nbytes, version, data in files],
            [(nbytes, version + "1", data) for nbytes, version, data in files],
            [],
        ):
            found = Checkpoint.open_with(path, "auto", (index, others)).infos()
            assert {info.name for info in found} == TENSORS.keys()


def test_shard_headers_of_a_changed_server_are_rejected(saved):
    with serving(Folder(saved.parent)) as server:
        url = server.url(f"/{saved.name}")
        headers = Checkpoint.open_url(url).shard_headers()
        server.replace(Folder(saved.parent, '"2"'))
        checkpoint = Checkpoint.open_url_with(url, None, headers)
        assert len(checkpoint.infos()) == len(TENSORS)
        with pytest.raises(StorageError, match="was written to"):
            load_tensors(checkpoint, None, wrap, None, PLAIN)


class Whole(Folder):
    """The same server without support for ranges."""

    def __call__(self, handler: Handler, request: Request) -> None:
        data = (self.path / request.path[1:]).read_bytes()
        handler.head(200, Content_Length=len(data), ETag=self.tag)
        handler.body(data)


def test_shard_headers_are_requested_by_each_rank_without_ranges(saved):
    with serving(Whole(saved.parent)) as server:
        assert Checkpoint.open_url(server.url(f"/{saved.name}")).shard_headers() is None


def test_shard_headers_of_a_file_system_are_not_used_for_a_server(saved, tmp_path):
    """The headers may be of a cached copy, which only one rank has."""
    if lacked := slow_disk.missing():
        pytest.skip(f"no FUSE mount: {lacked}")
    with slow_disk.mounted(saved.parent, tmp_path / "mount"), serving(Folder(saved.parent)) as server:
        headers = Checkpoint.open(tmp_path / "mount" / saved.name).shard_headers()
        checkpoint = Checkpoint.open_url_with(server.url(f"/{saved.name}"), None, headers)
        found = load_tensors(checkpoint, None, wrap, None, PLAIN)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_shard_headers_of_a_url_hold_no_secret(saved):
    options = {"headers": {"Authorization": "Bearer hush-hush"}, "region": "eu-central-1"}
    with serving(Folder(saved.parent)) as server:
        url = server.url(f"/{saved.name}?token=hush-hush")
        headers = Checkpoint.open_url(url, options).shard_headers()
    assert [version for _, version, _ in headers[1]] == ['tag "1"\nregion eu-central-1\n'] * len(headers[1])
    assert "hush" not in repr(headers)


def misses(source):
    with pytest.raises(FileNotFoundError, match="404"):
        load_into(target(), source, read_once="job")


def test_shard_headers_that_cannot_be_read_raise_on_all_ranks(four, tmp_path):
    with serving(Folder(tmp_path)) as server:
        server.replace(lambda handler, request: handler.head(404, Content_Length=0))
        four.run(misses, server.url("/none.safetensors"))
