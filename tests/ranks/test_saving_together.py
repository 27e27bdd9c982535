"""`save_sharded` by all ranks writes ordinary files, byte for byte the files of one process."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file as load_by_safetensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ingot
from ingot import RankError, SaveError
from ingot._ranks import peers, plan
from ingot.torch import _save_by_ranks, save_sharded
from support.ranks import GONE, PROMPT, contents


def whole():
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(50, 6, generator=generator)
    return {
        "rows": torch.randn(103, 256, generator=generator),
        "columns": torch.randn(128, 514, generator=generator).bfloat16(),
        "fused": torch.arange(96 * 7, dtype=torch.int64).view(96, 7),
        "replica": torch.randn(30, 1000, generator=generator),
        "experts": torch.randn(8, 33, 20, generator=generator).to(torch.float8_e4m3fn),
        "tied": tied,
        "again": tied,
        "narrow": torch.arange(6, dtype=torch.float64).view(1, 6),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "empty": torch.zeros(3, 0, dtype=torch.int32),
        "plain": torch.arange(7) % 2 == 0,
    }


def placed(tensors):
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2))
    over = {
        "rows": (grid, [_StridedShard(0, split_factor=size // 2), Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "fused": (flat, [_StridedShard(0, split_factor=2)]),
        "replica": (grid, [Replicate(), Shard(1)]),
        "experts": (grid, [Shard(0), Shard(2)]),
        "tied": (flat, [Shard(0)]),
        "narrow": (flat, [Shard(1)]),
        "scalar": (flat, [Replicate()]),
        "nothing": (flat, [Shard(0)]),
        "empty": (flat, [Shard(0)]),
    }
    found = {name: distribute_tensor(tensors[name], *over[name], src_data_rank=None) for name in over}
    found["again"] = found["tied"]
    found["plain"] = tensors["plain"].clone()
    return {name: found[name] for name in tensors}


OPTIONS = {
    "one file": {},
    "many files": {"max_shard_size": "100KB", "metadata": {"made": "by hand"}},
    "one file for each": {"max_shard_size": 1},
    "bintensors": {"filename_pattern": "model{suffix}.bt", "max_shard_size": "100KB"},
}


def saves(folder, options, nodes=None, window=None):
    rank = dist.get_rank()
    _save_by_ranks.this_node = lambda: "node" if nodes is None else f"node {nodes[rank]}"
    if window is not None:
        plan.WINDOW_NBYTES = _save_by_ranks.WINDOW_NBYTES = window
    try:
        save_sharded(placed(whole()), folder, **options)
    finally:
        _save_by_ranks.this_node = peers.this_node
        plan.WINDOW_NBYTES = _save_by_ranks.WINDOW_NBYTES = 32 << 20
    # The files are complete when the call returns on any rank.
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("nodes", "window"),
    [(None, None), ([0, 0, 1, 1], None), ([0, 1, 2, 3], 4096)],
    ids=["one machine", "two machines", "four machines, small windows"],
)
def test_save_sharded_writes_the_files_of_one_process(four, tmp_path, options, nodes, window):
    save_sharded(whole(), tmp_path / "one", **options)
    found = four.run(saves, tmp_path / "all", options, nodes, window)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
    assert found == [sorted(os.listdir(tmp_path / "one"))] * 4


def test_save_sharded_writes_files_that_safetensors_reads(four, tmp_path):
    four.run(saves, tmp_path, OPTIONS["many files"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    expected = whole()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_by_safetensors(tmp_path / file)[name].float(), expected[name].float())


def test_save_sharded_replaces_an_old_checkpoint(four, tmp_path):
    save_sharded({"old": torch.zeros(3)}, tmp_path)
    for found in four.outcomes(saves, tmp_path, {}):
        assert isinstance(
            found, FileExistsError if found is not None and not hasattr(found, "rank") else RankError
        )
    assert list(load_by_safetensors(tmp_path / "model.safetensors")) == ["old"]
    four.run(saves, tmp_path, {"overwrite": True, "max_shard_size": "100KB"})
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "model.safetensors.index.json").exists()


def stages(folder):
    """Save a pipeline: each rank has its own layers and one common layer."""
    rank = dist.get_rank()
    tensors = {f"layers.{rank}.weight": torch.full((4, rank + 1), rank), "shared": torch.arange(5)}
    save_sharded(tensors, folder, process_group=dist.group.WORLD)


def test_save_sharded_takes_different_names_per_rank(four, tmp_path):
    four.run(stages, tmp_path)
    found = load_by_safetensors(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "shared": [0, 1, 2, 3, 4],
        **{f"layers.{rank}.weight": [[rank] * (rank + 1)] * 4 for rank in range(4)},
    }


def wrong(folder, case):
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(whole()["rows"], mesh, [Shard(0)], src_data_rank=None)
    tensors = {"rows": tensor}
    if case == "partial":
        from torch.distributed.tensor import DTensor

        tensors["rows"] = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    if case == "another shape" and rank == 2:
        tensors["rows"] = torch.zeros(3)
    options = {"max_shard_size": 1 << 20 if case == "another size" and rank == 2 else 1000}
    if case == "a hole" and rank == 2:
        tensors = {}
    if case == "meta" and rank == 2:
        tensors["plain"] = torch.zeros(3, device="meta")
    save_sharded(tensors, folder, process_group=dist.group.WORLD, **options)


@pytest.mark.parametrize(
    ("case", "own", "message"),
    [
        ("partial", SaveError, "`rows`: .*Partial.*`.redistribute"),
        ("another shape", RankError, r"rank 2 of 4 has another tensor `rows`.* \[103, 256\].* \[3\]"),
        ("another size", RankError, "rank 2 of 4 has another max_shard_size .*expected 1000, found 1048576"),
        ("a hole", SaveError, r"`rows`: the ranks together do not hold each element once: expected 26368"),
        (
            "meta",
            SaveError,
            "tensor `plain`: a meta tensor has no values",
        ),
    ],
)
def test_save_sharded_rejects_what_is_not_whole(four, tmp_path, case, own, message):
    folder = tmp_path / "new"
    for found in four.outcomes(wrong, folder, case):
        assert isinstance(found, own if not isinstance(found, RankError) else RankError)
        assert re.search(message, str(found)), found
    assert not folder.exists()


def breaks(folder, case, step, nodes):
    """Make rank 1 fail at its collective of this number."""
    rank = dist.get_rank()
    _save_by_ranks.this_node = lambda: f"node {nodes[rank]}"
    wait, steps = peers.Peers._wait, []

    def counted(self, begin, doing):
        steps.append(doing)
        if rank == 1 and len(steps) > step:
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2)
            steps.clear()
        wait(self, begin, doing)

    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    peers.Peers._wait = counted
    if case == "full" and rank == 1:
        ingot.Writer.write = full
    tensor = distribute_tensor(
        whole()["columns"], init_device_mesh("cpu", (3,)), [Shard(1)], src_data_rank=None
    )
    save_sharded({"columns": tensor}, folder, overwrite=True)


KILLED = [
    ("killed", step, nodes) for step in (0, 6, 8, 11, 12, 13, 14, 16) for nodes in ([0, 0, 0], [0, 1, 2])
]


@pytest.mark.parametrize(
    ("case", "step", "nodes"),
    [
        ("killed", 10, [0, 0, 0]),
        ("full", 99, [0, 0, 0]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [*KILLED, ("late", 8, [0, 1, 1])]),
    ],
)
def test_save_sharded_leaves_a_whole_checkpoint_if_a_rank_stops(some, tmp_path, case, step, nodes):
    folder = tmp_path / "model"
    save_sharded({"columns": torch.zeros(5)}, folder)
    before = contents(folder)
    found = some.outcomes(breaks, folder, case, step, nodes, seconds=PROMPT)
    if case == "late":
        assert found == [None] * 3
        return
    if found[1] is GONE:
        for rank in (0, 2):
            assert isinstance(found[rank], RankError), found[rank]
            assert found[rank].rank == 1
    elif case == "full":
        assert isinstance(found[1], OSError)
        for rank in (0, 2):
            assert re.search("rank 1 of 3 failed in writing: OSError: .*No space left", str(found[rank]))
            assert ".ingot" not in str(found[rank])
    else:
        # It had nothing left to say when it would have been killed.
        assert found == [None] * 3
        return
    # If the rank is killed after the rename, the new file is there.
    save_sharded({"columns": whole()["columns"]}, tmp_path / "new")
    assert contents(folder)["model.safetensors"] in (
        before["model.safetensors"],
        contents(tmp_path / "new")["model.safetensors"],
    )
    # The next save removes the leftovers of this one.
    save_sharded({"columns": torch.ones(5)}, folder, overwrite=True)
    assert sorted(os.listdir(folder)) == ["model.safetensors"]
