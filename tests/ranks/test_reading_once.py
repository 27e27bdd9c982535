"""`load_into(read_once=…)`: one rank reads each byte, and sends it to the ranks that need it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ingot
from ingot import OptionError, RankError
from ingot._ranks import peers, plan
from ingot.torch import _load_by_ranks, load_into, save_file
from support.ranks import GONE, PROMPT, Counting


def whole():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(1030, 256, generator=generator),
        "columns": torch.randn(512, 514, generator=generator).bfloat16(),
        "fused": torch.arange(96 * 7, dtype=torch.int64).view(96, 7),
        "replica": torch.randn(300, 1000, generator=generator),
        "experts": torch.randn(8, 33, 20, generator=generator).to(torch.float8_e4m3fn),
        "narrow": torch.arange(6, dtype=torch.float64).view(1, 6),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "plain": torch.arange(7) % 2 == 0,
    }


def placed(tensors):
    """Return the tensors with placements of every kind that this number of ranks permits."""
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2))
    over = {
        "rows": (grid, [_StridedShard(0, split_factor=size // 2), Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "fused": (flat, [_StridedShard(0, split_factor=2)]),
        "replica": (grid, [Replicate(), Replicate()]),
        "experts": (grid, [Shard(0), Shard(2)]),
        "narrow": (flat, [Shard(1)]),
        "scalar": (flat, [Replicate()]),
        "nothing": (flat, [Shard(0)]),
    }
    found = {name: distribute_tensor(tensors[name], *over[name], src_data_rank=None) for name in over}
    return found | {"plain": tensors["plain"].clone()}


def same(found, expected):
    for name, tensor in expected.items():
        one, other = (getattr(each, "to_local", lambda each=each: each)() for each in (found[name], tensor))
        assert one.dtype == other.dtype, name
        assert torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        ), name


def loads(path, read_once, dtype=None, window=None, nodes=None):
    if window is not None:
        plan.WINDOW_NBYTES, plan._LEAST_NBYTES, plan.DIRECT_NBYTES = window
    rank = dist.get_rank()
    _load_by_ranks.this_node = lambda: "node" if nodes is None else f"node {nodes[rank]}"
    try:
        expected = placed({name: tensor.to(dtype or tensor.dtype) for name, tensor in whole().items()})
        target = placed({name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in whole().items()})
        counted = []
        versions = {name: tensor._version for name, tensor in target.items()}
        found = load_into(
            target, path, read_once=read_once, progress=lambda done, total: counted.append((done, total))
        )
        assert found == ([], [])
        same(target, expected)
        assert all(tensor._version > versions[name] for name, tensor in target.items())
        done, total = counted[-1]
        assert done == total
        return sum(getattr(one, "to_local", lambda one=one: one)().nbytes for one in target.values()) == total
    finally:
        plan.WINDOW_NBYTES, plan._LEAST_NBYTES, plan.DIRECT_NBYTES = 32 << 20, 1 << 20, 128 << 10
        _load_by_ranks.this_node = peers.this_node


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("once") / "model.safetensors"
    save_file(whole(), path)
    return path


@pytest.mark.parametrize("read_once", ["auto", "node", "job", False])
def test_read_once_loads_the_part_of_each_rank(four, path, read_once):
    assert all(four.run(loads, path, read_once))


@pytest.mark.parametrize(
    "window", [(16 << 10, 256, 1 << 40), (64 << 10, 1 << 10, 4096)], ids=["tiny", "small"]
)
@pytest.mark.parametrize("read_once", ["node", "job"])
def test_read_once_works_in_many_windows(four, path, read_once, window):
    four.run(loads, path, read_once, None, window, [0, 1, 0, 1])


def test_read_once_converts_on_the_receiver(four, path):
    four.run(loads, path, "job", torch.float64)
    four.run(loads, path, "job", torch.float32, (64 << 10, 1 << 10, 1 << 40))


def bytes_asked_for(path, read_once, nodes=None):
    store = Counting(path)
    rank = dist.get_rank()
    _load_by_ranks.this_node = lambda: "node" if nodes is None else f"node {nodes[rank]}"
    try:
        load_into(placed(whole()), ingot.Ranges(store, "model"), read_once=read_once)
    finally:
        _load_by_ranks.this_node = peers.this_node
    return store.nbytes


def test_read_once_reads_each_byte_once_per_job_or_node(four, path):
    nbytes = path.stat().st_size
    assert 0.99 * nbytes <= sum(four.run(bytes_asked_for, path, "job")) <= 1.02 * nbytes
    assert sum(four.run(bytes_asked_for, path, "node", [0, 0, 1, 1])) <= 2.02 * nbytes
    # Files over a network for several nodes are read once by default.
    assert sum(four.run(bytes_asked_for, path, "auto", [0, 0, 1, 1])) <= 1.02 * nbytes
    alone = four.run(bytes_asked_for, path, "auto")
    assert sum(alone) > 2 * nbytes


def peak_beside_tensors(path, count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {
        f"{number}": distribute_tensor(torch.ones(1024, 2048), mesh, [Shard(1)], src_data_rank=None)
        for number in range(count)
    }

    def memory(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    load_into(target, path, read_once="job")
    assert all(float(tensor.to_local()[3, 4]) == 2.0 for tensor in target.values())
    return memory("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_read_once_takes_little_memory_beside_the_tensors(four, tmp_path):
    # Each rank reads several windows.
    tensor = torch.full((1024, 2048), 2.0)
    save_file({f"{number}": tensor.clone() for number in range(48)}, tmp_path / "model.safetensors")
    peaks = four.run(peak_beside_tensors, tmp_path / "model.safetensors", 48)
    assert max(peaks) <= 128 << 20


def test_read_once_needs_a_process_group(path):
    with pytest.raises(OptionError, match="read_once 'job' is for ranks of a process group"):
        load_into({}, path, strict=False, read_once="job")
    with pytest.raises(OptionError, match="read_once 'twice' is unknown: expected one of auto, job, node"):
        load_into({}, path, strict=False, read_once="twice")


def fails(path, read_once, case):
    rank = dist.get_rank()

    def happens():
        if rank == 1 and case == "raises":
            raise OSError("the cable is out")
        if rank == 1 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and case == "late":
            time.sleep(2)

    if rank == 1 and case == "another file":
        path = path.with_name("another.safetensors")
        save_file({"rows": torch.zeros(1030, 256)}, path)
    if rank == 1 and case == "no file":
        path = path.with_name("nowhere.safetensors")
    store = Counting(path, happens)
    target = placed(whole())
    if rank == 1 and case == "destination":
        target["columns"] = torch.zeros(3)
    if rank == 1 and case == "option":
        read_once = "node"
    began = time.monotonic()
    try:
        load_into(target, ingot.Ranges(store, "model"), read_once=read_once, strict=False)
    finally:
        assert time.monotonic() - began < PROMPT


@pytest.mark.parametrize("read_once", ["job", "auto"])
@pytest.mark.parametrize(
    ("case", "own", "message"),
    [
        ("raises", ingot.StorageError, "rank 1 of 4 failed in reading.*the object raised OSError$"),
        ("no file", FileNotFoundError, "rank 1 of 4 failed in opening: FileNotFoundError"),
        ("another file", RankError, "rank 1 of 4 has another file than rank 0"),
        ("destination", ingot.DestinationError, "rank 1 of 4 failed in .*`columns`.*another shape"),
    ],
)
def test_read_once_raises_on_all_ranks_if_one_fails(four, path, read_once, case, own, message):
    for rank, found in enumerate(four.outcomes(fails, path, read_once, case)):
        if rank == 1 and own is not RankError:
            assert isinstance(found, own)
            assert any("rank 1 of 4" in note for note in found.__notes__)
        else:
            assert isinstance(found, RankError), found
            assert re.search(message, str(found)), found
            assert found.rank == 1


def test_read_once_rejects_different_requests(four, path):
    for found in four.outcomes(fails, path, "job", "option"):
        assert isinstance(found, RankError)
        assert "rank 1 of 4 has another read_once than rank 0" in str(found)


@pytest.mark.slow
def test_read_once_waits_for_a_late_rank(four, path):
    assert four.run(fails, path, "job", "late") == [None] * 4


def dies(path, read_once, step):
    """Kill rank 1 at its collective of this number."""
    wait, steps = peers.Peers._wait, []

    def counted(self, begin, doing):
        steps.append(doing)
        if dist.get_rank() == 1 and len(steps) > step:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(self, begin, doing)

    peers.Peers._wait = counted
    plan.WINDOW_NBYTES, plan._LEAST_NBYTES, plan.DIRECT_NBYTES = 1 << 16, 1 << 10, 1 << 40
    mesh = init_device_mesh("cpu", (3,))
    target = {"columns": distribute_tensor(whole()["columns"], mesh, [Shard(1)], src_data_rank=None)}
    load_into(target, path, read_once=read_once, strict=False)
    return len(steps)


KILLED = [("auto", 0), ("auto", 1), ("job", 2), ("job", 9)]


@pytest.mark.parametrize(
    ("read_once", "step"),
    [("job", 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in KILLED)],
)
def test_read_once_raises_on_the_others_if_a_rank_is_killed(some, path, read_once, step):
    found = some.outcomes(dies, path, read_once, step, seconds=PROMPT)
    assert found[1] is GONE
    for rank in (0, 2):
        assert isinstance(found[rank], RankError), found[rank]
        assert (found[rank].rank, found[rank].code) == (1, "rank-lost")
        assert re.search("rank 1 of 3 was lost or does not answer", str(found[rank]))
