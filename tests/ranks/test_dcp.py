"""`ingot.dcp` as the storage of torch.distributed.checkpoint, compared with torch's Hugging Face storage."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file as load_by_safetensors
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ingot
import ingot.dcp
from ingot._ranks import peers
from ingot.dcp import writer as writing
from ingot.torch import _save_by_ranks, save_file, save_sharded
from support.ranks import PROMPT, Counting, contents

# torch warns of each save and load without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(103, 256, generator=generator),
        "columns": torch.randn(128, 514, generator=generator).bfloat16(),
        "both": torch.arange(96 * 7, dtype=torch.int64).view(96, 7),
        "few": torch.arange(6, dtype=torch.int32).view(3, 2),
        "replica": torch.randn(30, 1000, generator=generator),
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7),
        "plain": torch.arange(7) % 2 == 0,
    }


class Interrupted(ingot.dcp.Reader):
    """A reader whose first rank replaces the files before the other ranks open them."""

    is_replaced = False

    def _opened(self):
        if self.is_replaced:
            return super()._opened()
        self.is_replaced = True
        if dist.get_rank():
            dist.barrier()
            return super()._opened()
        found = super()._opened()
        save_sharded({"w": torch.ones(4)}, self._path, overwrite=True)
        dist.barrier()
        return found


def load_while_replaced(folder):
    state = {"w": torch.empty(4)}
    dcp.load(state, storage_reader=Interrupted(folder))
    return state["w"].tolist()


def load_part_while_replaced(folder):
    """Load by the first two ranks, without passing their group to the reader."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dcp.load({"w": torch.empty(4)}, storage_reader=Interrupted(folder), process_group=group)
    else:
        dist.barrier()


def test_reader_loads_one_version_if_a_save_comes_between_ranks(four, tmp_path):
    save_sharded({"w": torch.zeros(4)}, tmp_path)
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    assert four.run(load_while_replaced, str(tmp_path)) == [[1.0] * 4] * 4


def test_reader_rejects_several_versions_on_ranks_that_it_does_not_know(four, tmp_path):
    save_sharded({"w": torch.zeros(4)}, tmp_path)
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    found = four.outcomes(load_part_while_replaced, str(tmp_path))
    assert found[2:] == [None, None]
    assert all(isinstance(one, CheckpointException) and "different versions" in str(one) for one in found[:2])


class Replaced(ingot.dcp.Reader):
    """A reader of files that a save replaces after all ranks have planned what to read from them."""

    def __init__(self, folder, state, **options):
        super().__init__(folder, **options)
        self._state = state

    def read_data(self, plan, planner):
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_sharded(self._state, self._path, 80, overwrite=True)
        if dist.is_initialized():
            dist.barrier()
        return super().read_data(plan, planner)


def shards(value, count=60):
    return {f"t{number:02}": torch.full((16,), float(value)) for number in range(count)}


def load_replaced(folder, state, **options):
    found = shards(0)
    dcp.load(found, storage_reader=Replaced(folder, state, **options))
    return sorted({float(value) for tensor in found.values() for value in tensor})


def load_replaced_in_part(folder, state):
    """Load by the first two ranks, without passing their group to the reader."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dcp.load(shards(0), storage_reader=Replaced(folder, state), process_group=group)
    else:
        dist.barrier()


def test_reader_loads_many_shards_that_are_replaced_after_planning(tmp_path, backend):
    save_sharded(shards(1), tmp_path, 80)
    assert len([*tmp_path.glob("*.safetensors")]) == 60
    assert load_replaced(tmp_path, shards(2), backend=backend) == [2.0]
    # Some shards do not exist any more.
    assert load_replaced(tmp_path, shards(3) | {"more": torch.zeros(99)}, backend=backend) == [3.0]


@pytest.mark.parametrize("read_once", [False, "job"])
def test_reader_of_many_ranks_loads_one_version_of_replaced_shards(four, tmp_path, read_once):
    save_sharded(shards(1), tmp_path, 80)
    run = partial(load_replaced, str(tmp_path), shards(2), read_once=read_once)
    assert four.run(run) == [[2.0]] * 4


def test_reader_rejects_replaced_shards_that_the_plan_does_not_fit(four, tmp_path):
    save_sharded(shards(1), tmp_path, 80)
    other = shards(2) | {"t07": torch.zeros(3)}
    for one in four.outcomes(load_replaced, str(tmp_path), other):
        assert isinstance(one, CheckpointException)
        assert "t07" in str(one)
    save_sharded(shards(1), tmp_path, 80, overwrite=True)
    with pytest.raises(CheckpointException, match="during the load: load them again"):
        load_replaced(tmp_path, other)


def load_with_a_failure(folder):
    def fail(done, total):
        if dist.get_rank() == 1:
            raise MemoryError("no room for it")

    dcp.load(shards(0), storage_reader=ingot.dcp.Reader(folder, progress=fail))


def test_reader_of_shards_raises_on_all_ranks_if_one_fails(four, tmp_path):
    save_sharded(shards(1), tmp_path, 80)
    for one in four.outcomes(load_with_a_failure, str(tmp_path), seconds=PROMPT):
        assert isinstance(one, CheckpointException)
        assert "rank 1 of 4 failed in reading: MemoryError" in str(one)
    assert four.run(load_replaced, str(tmp_path), shards(2)) == [[2.0]] * 4


def test_reader_rejects_replaced_shards_of_ranks_that_it_does_not_know(four, tmp_path):
    save_sharded(shards(1), tmp_path, 80)
    found = four.outcomes(load_replaced_in_part, str(tmp_path), shards(2))
    assert found[2:] == [None, None]
    for one in found[:2]:
        assert isinstance(one, CheckpointException)
        assert "open it again" in str(one)


MESHES = {"flat": (4,), "grid": (2, 2)}
PLACEMENTS = {
    "flat": {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(0)], "few": [Shard(0)]},
    "grid": {
        "rows": [Shard(0), Shard(0)],
        "columns": [Replicate(), Shard(0)],
        "both": [Shard(1), Shard(0)],
        "few": [Shard(1), Replicate()],
        "scalar": [Replicate(), Replicate()],
    },
}


def placed(layout, change=lambda tensor: tensor.clone()):
    mesh = init_device_mesh("cpu", MESHES[layout])
    replicated = [Replicate()] * len(MESHES[layout])
    over = {"replica": replicated, **PLACEMENTS[layout]}
    return {
        name: distribute_tensor(change(tensor), mesh, over[name], src_data_rank=None)
        if name in over
        else change(tensor)
        for name, tensor in whole().items()
    }


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def load(reader, layout, dtype=None):
    target = placed(layout, lambda tensor: torch.ones_like(tensor, dtype=dtype))
    dcp.load(target, storage_reader=reader)
    for name, expected in placed(layout, lambda tensor: tensor.to(dtype or tensor.dtype)).items():
        assert local(target[name]).dtype == local(expected).dtype
        assert torch.equal(local(target[name]), local(expected)), name


def loads(path, layout, dtype=None, read_once=False):
    load(ingot.dcp.Reader(path, read_once=read_once), layout, dtype)


def saves(path, layout, options, background=False, nodes=None):
    rank = dist.get_rank()
    for module in (_save_by_ranks, writing):
        module.this_node = lambda: "node" if nodes is None else f"node {nodes[rank]}"
    writer = ingot.dcp.Writer(path, **options)
    try:
        if background:
            dcp.async_save(placed(layout), storage_writer=writer).result()
        else:
            dcp.save(placed(layout), storage_writer=writer)
    finally:
        for module in (_save_by_ranks, writing):
            module.this_node = peers.this_node


OPTIONS = {"one file": {}, "many files": {"max_shard_size": "50KB", "metadata": {"made": "by hand"}}}


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("nodes", [None, [0, 0, 1, 1], [0, 1, 2, 3]], ids=["one", "two", "four machines"])
def test_writer_saves_the_files_of_one_process(four, tmp_path, layout, options, background, nodes):
    save_sharded(whole(), tmp_path / "one", **options)
    four.run(saves, tmp_path / "all", layout, options, background, nodes)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")


def saves_twice_the_same_tensor(path):
    """Save two parts of one tensor from one rank, as `ShardedTensor` permits."""
    rank = dist.get_rank()
    writing.this_node = lambda: f"node {rank}"

    class Twice(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=plan.items * 2)

        def create_global_plan(self, plans):
            return plans, Metadata({})

    mesh = init_device_mesh("cpu", (4,))
    state = {"a": distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)}
    try:
        dcp.save(state, storage_writer=ingot.dcp.Writer(path), planner=Twice())
    finally:
        writing.this_node = peers.this_node


def test_writer_sends_no_parts_between_machines(four, tmp_path):
    for found in four.outcomes(saves_twice_the_same_tensor, tmp_path / "model"):
        assert isinstance(found, CheckpointException)
        assert "`a`: a rank has several parts of it" in str(found)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("read_once", ["auto", "node", "job"])
def test_reader_reads_for_other_ranks(four, tmp_path, read_once):
    save_sharded(whole(), tmp_path / "whole", max_shard_size="50KB")
    four.run(loads, tmp_path / "whole", "flat", torch.float64, read_once)
    four.run(saves, tmp_path / "parts", "grid", {"whole": False})
    for layout in MESHES:
        four.run(loads, tmp_path / "parts", layout, None, read_once)


def bytes_asked_for(path, read_once):
    store = Counting(path)
    load(ingot.dcp.Reader(ingot.Ranges(store, "model"), read_once=read_once), "flat")
    return store.nbytes


def test_reader_reads_each_byte_once(four, tmp_path):
    save_sharded(whole(), tmp_path)
    path = tmp_path / "model.safetensors"
    nbytes = path.stat().st_size
    assert 0.9 * nbytes <= sum(four.run(bytes_asked_for, path, "job")) <= 1.02 * nbytes
    assert sum(four.run(bytes_asked_for, path, False)) > 1.3 * nbytes


def reads_wrongly(path, case):
    rank = dist.get_rank()
    target = placed("flat", torch.ones_like)
    planner = DefaultLoadPlanner()
    if case == "raises" and rank == 1:

        def full(item):
            raise MemoryError("no room for it")

        planner.resolve_tensor = full
    if case == "another file" and rank == 1:
        path = path.with_name("other")
    reader = ingot.dcp.Reader(path, read_once="job")
    dcp.load(target, storage_reader=reader, planner=planner)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("raises", "rank 1 of 4 failed in planning: MemoryError: no room for it"),
        ("another file", "rank 1 of 4 has another file than rank 0"),
    ],
)
def test_reader_raises_on_all_ranks_if_one_fails(four, tmp_path, case, message):
    save_sharded(whole(), tmp_path / "model")
    save_sharded(whole(), tmp_path / "other")
    for found in four.outcomes(reads_wrongly, tmp_path / "model", case):
        assert isinstance(found, CheckpointException)
        assert message in str(found)


def test_reader_checks_read_once_at_once(tmp_path):
    with pytest.raises(ingot.OptionError, match="read_once 'twice' is unknown"):
        ingot.dcp.Reader(tmp_path, read_once="twice")
    with pytest.raises(
        ingot.OptionError, match=r"there is none: call `torch\.distributed\.init_process_group`"
    ):
        ingot.dcp.Reader(tmp_path, read_once="job")


def test_writer_ignores_parts_of_an_earlier_save(four, tmp_path):
    save_file({"rows": torch.zeros(2)}, tmp_path / "shard-00009-model-00001-of-00001.safetensors")
    for found in four.outcomes(saves, tmp_path, "flat", {"whole": False}):
        assert isinstance(found, CheckpointException)
        assert "FileExistsError" in str(found)
    four.run(saves, tmp_path, "flat", {"whole": False, "overwrite": True})
    assert len(os.listdir(tmp_path)) == 4
    four.run(loads, tmp_path, "grid")


def one_process(path):
    """Save and load without a process group."""
    state = {name: torch.ones_like(tensor) for name, tensor in whole().items()}
    dcp.load(state, storage_reader=ingot.dcp.Reader(path), no_dist=True)
    return state


def test_writer_and_reader_work_in_one_process(tmp_path):
    dcp.save(whole(), storage_writer=ingot.dcp.Writer(tmp_path / "model"), no_dist=True)
    found = one_process(tmp_path / "model")
    for name, tensor in load_by_safetensors(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(tensor, whole()[name])
        assert torch.equal(found[name], whole()[name])


def test_checkpoint_id_sets_the_directory(tmp_path):
    dcp.save(
        whole(), checkpoint_id=tmp_path / "b", storage_writer=ingot.dcp.Writer(tmp_path / "a"), no_dist=True
    )
    assert os.listdir(tmp_path) == ["b"]
    state = {"rows": torch.zeros(103, 256)}
    dcp.load(
        state, checkpoint_id=tmp_path / "b", storage_reader=ingot.dcp.Reader(tmp_path / "a"), no_dist=True
    )
    assert torch.equal(state["rows"], whole()["rows"])


def save_alone(state, path, **options):
    dcp.save(state, storage_writer=ingot.dcp.Writer(path, **options), no_dist=True)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"hook": print}, "`hook`: only pickle could store builtins.builtin_function_or_method"),
        ({"loader": {"rows": (1, print)}}, r"`loader.rows\[1\]`: only pickle could store"),
        ({"meta": torch.zeros(3, device="meta")}, "`meta`: a meta tensor has no values"),
    ],
)
def test_writer_names_values_that_files_cannot_hold(tmp_path, state, message):
    with pytest.raises((CheckpointException, ingot.SaveError), match=message):
        save_alone(state, tmp_path / "model")
    assert not (tmp_path / "model").exists() or not os.listdir(tmp_path / "model")


def test_writer_needs_overwrite_to_replace(tmp_path):
    save_alone({"a": torch.zeros(3)}, tmp_path)
    with pytest.raises((CheckpointException, FileExistsError), match="overwrite=True"):
        save_alone({"a": torch.ones(3)}, tmp_path)
    assert load_by_safetensors(tmp_path / "model.safetensors")["a"].tolist() == [0, 0, 0]
    save_alone({"a": torch.ones(3)}, tmp_path, overwrite=True)
    assert load_by_safetensors(tmp_path / "model.safetensors")["a"].tolist() == [1, 1, 1]


def fails(path):
    writer = ingot.dcp.Writer(path, overwrite=True)
    if dist.get_rank() == 2:

        def full(plan, planner):
            raise OSError(28, "No space left on device")

        writer.write_data = full
    try:
        dcp.save(placed("flat"), storage_writer=writer)
    finally:
        del writer


def test_writer_keeps_the_old_checkpoint_if_a_rank_fails(four, tmp_path):
    save_sharded({"old": torch.zeros(3)}, tmp_path)
    for found in four.outcomes(fails, tmp_path):
        assert isinstance(found, CheckpointException)
        assert re.search("ranks:.*2.*No space left", str(found), re.DOTALL)
    assert list(load_by_safetensors(tmp_path / "model.safetensors")) == ["old"]
    save_alone({"new": torch.zeros(3)}, tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: "nonsense", "DCP_SHARDING_INFO .* cannot be read"),
        (lambda info: info.replace("[2]", "[2, 0]"), "tensor `a` cannot begin at"),
        (
            lambda info: info.replace("[2]", "[3]"),
            "`a`: .* expected 5 elements .* found 4 in 2 parts",
        ),
        (
            lambda info: info.replace("[2]", "[1]"),
            "`a`: .* expected 3 elements .* found 4 in 2 parts",
        ),
    ],
    ids=["no JSON", "another rank", "a hole", "an overlap"],
)
def test_writer_rejects_parts_that_are_no_tensors(tmp_path, change, message):
    for number, begin in enumerate([0, 2]):
        info = ingot.dcp.parts.metadata({"a": [begin]})
        info["DCP_SHARDING_INFO"] = change(info["DCP_SHARDING_INFO"]) if begin else info["DCP_SHARDING_INFO"]
        save_file({"a": torch.zeros(2)}, tmp_path / f"shard-{number}.safetensors", info)
    with pytest.raises(ingot.CheckpointError, match=message):
        ingot.dcp.Reader(tmp_path).read_metadata()


def test_reader_names_a_missing_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ingot.dcp.Reader(tmp_path / "nowhere").read_metadata()
