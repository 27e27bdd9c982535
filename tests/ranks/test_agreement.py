"""Faults of one rank: all ranks raise, or the tensor comes from the ranks that hold it."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ingot.torch
from ingot import DestinationError, OptionError, RankError, SaveError
from ingot.torch import load_file, load_into, save_file, save_sharded
from support.ranks import PROMPT


def on_mesh(tensors, ranks):
    mesh = DeviceMesh("cpu", ranks)
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()], src_data_rank=None)
        for name, tensor in tensors.items()
    }


def values():
    return {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "rows": torch.arange(35.0).view(7, 5),
        "one": torch.tensor([2.5]),
        "empty": torch.zeros(0, 4),
    }


def saves_on(folder, ranks):
    # The allocator reuses this memory: tensors that nothing fills get the value 1234.5.
    junk = [torch.full(shape, 1234.5) for shape in [(), (1,), (7, 5)] * 300]
    del junk
    save_sharded(on_mesh(values(), ranks), folder)


@pytest.mark.parametrize("ranks", [[1, 2], [3], [0, 2, 3], [0, 1, 2, 3]])
def test_save_sharded_stores_values_of_the_mesh(four, tmp_path, ranks):
    four.run(saves_on, tmp_path / "all", ranks)
    found = load_file(tmp_path / "all")
    for name, expected in values().items():
        assert torch.equal(found[name], expected), name


def loads_on(folder, ranks, read_once):
    target = on_mesh({name: torch.zeros_like(tensor) for name, tensor in values().items()}, ranks)
    load_into(target, folder, read_once=read_once)
    for name, expected in on_mesh(values(), ranks).items():
        if dist.get_rank() in ranks:
            assert torch.equal(target[name].to_local(), expected.to_local()), name


@pytest.mark.parametrize("read_once", ["auto", "job"])
def test_load_into_fills_a_mesh_that_lacks_ranks(four, tmp_path, read_once):
    save_sharded(values(), tmp_path)
    four.run(loads_on, tmp_path, [1, 2], read_once)


def annotated(memory, whole, begins, places, sizes):
    """Return `memory` with the attributes of torch's CheckpointableTensor."""
    memory.global_shape, memory.global_offsets = whole, begins
    memory.local_offsets, memory.local_sizes = places, sizes
    return memory


def whole():
    return torch.arange(24 * 4.0).view(24, 4)


def parts(kind, fill):
    """Return a whole tensor, of which each of four ranks has a part."""
    rank = dist.get_rank()
    rows = torch.empty(6, 4)
    if kind == "rows":
        rows = annotated(rows, (24, 4), ((6 * rank, 0),), ((0, 0),), ((6, 4),))
        taken = [(slice(0, 6), slice(6 * rank, 6 * rank + 6))]
    elif kind == "padded":
        rows = annotated(torch.empty(8, 5), (24, 4), ((6 * rank, 0),), ((1, 0),), ((6, 4),))
        taken = [((slice(1, 7), slice(0, 4)), slice(6 * rank, 6 * rank + 6))]
    elif kind == "fused":
        begins = ((3 * rank, 0), (12 + 3 * rank, 0))
        rows = annotated(rows, (24, 4), begins, ((0, 0), (3, 0)), ((3, 4), (3, 4)))
        taken = [
            (slice(0, 3), slice(3 * rank, 3 * rank + 3)),
            (slice(3, 6), slice(12 + 3 * rank, 15 + 3 * rank)),
        ]
    else:
        has_any = rank < 2
        rows = annotated(
            torch.empty(12 * has_any, 4),
            (24, 4),
            ((12 * rank, 0),) if has_any else ((24, 0),),
            ((0, 0),),
            ((12 * has_any, 4),),
        )
        taken = [(slice(0, 12), slice(12 * rank, 12 * rank + 12))] if has_any else []
    for place, of in taken:
        if fill:
            rows[place] = whole()[of]
        else:
            assert torch.equal(rows[place], whole()[of])
    return rows


def saves_parts(folder, kind):
    save_sharded({"w": parts(kind, True), "plain": torch.arange(3)}, folder)


def loads_parts(folder, kind):
    rows = parts(kind, True).zero_()
    load_into({"w": rows}, folder, strict=False)
    expected = parts(kind, True)
    assert torch.equal(
        rows[1:7, :4] if kind == "padded" else rows, expected[1:7, :4] if kind == "padded" else expected
    )


KINDS = ["rows", "padded", "fused", "few ranks"]


@pytest.mark.parametrize("kind", KINDS)
def test_save_sharded_stores_a_checkpointable_tensor_whole(four, tmp_path, kind):
    four.run(saves_parts, tmp_path, kind)
    assert torch.equal(load_file(tmp_path)["w"], whole())


@pytest.mark.parametrize("kind", KINDS)
def test_load_into_fills_the_part_of_a_checkpointable_tensor(four, tmp_path, kind):
    save_sharded({"w": whole(), "plain": torch.arange(3)}, tmp_path)
    four.run(loads_parts, tmp_path, kind)


class Annotated(torch.nn.Module):
    """A module whose parameter describes the part that it has."""

    def __init__(self, rows):
        super().__init__()
        self.w = torch.nn.Parameter(rows)
        vars(self.w).update(vars(rows))


def loads_module(folder):
    module = Annotated(parts("rows", True).zero_())
    load_into(module, folder)
    assert torch.equal(module.w, parts("rows", True))


def test_load_into_fills_a_module_with_checkpointable_tensors(four, tmp_path):
    save_sharded({"w": whole()}, tmp_path)
    four.run(loads_module, tmp_path)


class Hooked(torch.Tensor):
    """A tensor that describes its parts to torch.distributed.checkpoint."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __create_write_items__(self, fqn, object):
        raise AssertionError("not called")


def odd(kind):
    rows = torch.zeros(6, 4)
    if kind == "hooks":
        return rows.as_subclass(Hooked)
    begins, places, sizes = ((0, 0),), ((0, 0),), ((6, 4),)
    if kind == "shuffled":
        begins, places, sizes = ((12, 0), (0, 0)), ((0, 0), (3, 0)), ((3, 4), (3, 4))
    if kind == "outside":
        begins = ((20, 0),)
    if kind == "no numbers":
        begins = None
    return annotated(rows, (24, 4), begins, places, sizes)


def uses_odd(folder, kind, load):
    tensors = {"w": odd(kind) if dist.get_rank() == 1 else torch.zeros(24, 4)}
    tensors |= on_mesh({"rows": whole()}, [0, 1, 2, 3])
    load_into(tensors, folder) if load else save_sharded(tensors, folder)


@pytest.mark.parametrize("kind", ["hooks", "shuffled", "outside", "no numbers"])
@pytest.mark.parametrize("load", [False, True], ids=["save", "load"])
def test_save_sharded_rejects_impossible_parts_on_all_ranks(four, tmp_path, kind, load):
    folder = tmp_path / "model"
    if load:
        save_sharded({"w": torch.zeros(24, 4), "rows": whole()}, folder)
    for rank, found in enumerate(four.outcomes(uses_odd, folder, kind, load, seconds=PROMPT)):
        assert isinstance(found, (DestinationError if load else SaveError) if rank == 1 else RankError), found
    assert load or not folder.exists()


BAD = {
    "no tensor": ({"tensors": {"epoch": 3}}, ValueError),
    "no name": ({"tensors": {3: torch.zeros(3)}}, TypeError),
    "size": ({"max_shard_size": "many"}, OptionError),
    "pattern": ({"filename_pattern": "model"}, OptionError),
    "metadata": ({"metadata": {"a": 1}}, TypeError),
    "checksums": ({"checksums": "xxh3"}, OptionError),
    "snapshot": ({"write_options": {"snapshot": "nowhere"}}, OptionError),
    "destination": ({"destination": 3}, TypeError),
    "other directory": ({"destination": "other"}, RankError),
}


def saves_badly(folder, case):
    os.chdir(folder)
    options = {"destination": "model", **(BAD[case][0] if dist.get_rank() == 1 else {})}
    tensors = on_mesh({"w": torch.ones(8)}, [0, 1, 2, 3]) | options.pop("tensors", {})
    began = time.monotonic()
    try:
        save_sharded(tensors, options.pop("destination"), **options)
    finally:
        assert time.monotonic() - began < PROMPT


@pytest.mark.parametrize("case", BAD)
def test_save_sharded_raises_on_all_ranks_if_one_has_bad_arguments(four, tmp_path, case):
    for rank, found in enumerate(four.outcomes(saves_badly, tmp_path, case, seconds=PROMPT)):
        assert isinstance(found, BAD[case][1] if rank == 1 else RankError), found
        if rank != 1:
            assert found.rank == 1
    assert os.listdir(tmp_path) == []


def loads_badly(folder, case):
    rank = dist.get_rank()
    target = on_mesh({"w": torch.ones(8)}, [0, 1, 2, 3])
    options, source = {}, folder / "model"
    if rank == 1:
        if case == "no tensor":
            target["epoch"] = 3
        if case == "read_once":
            options["read_once"] = "jobs"
        if case == "backend":
            options["backend"] = "disk"
        if case == "other directory":
            source = folder / "other"
    load_into(target, source, strict=False, **options)


@pytest.mark.parametrize(
    ("case", "own"),
    [
        ("no tensor", TypeError),
        ("read_once", OptionError),
        ("backend", OptionError),
        ("other directory", RankError),
    ],
)
def test_load_into_raises_on_all_ranks_if_one_has_bad_arguments(four, tmp_path, case, own):
    for name in ("model", "other"):
        save_sharded({"w": torch.zeros(8)}, tmp_path / name)
    for rank, found in enumerate(four.outcomes(loads_badly, tmp_path, case, seconds=PROMPT)):
        assert isinstance(found, own if rank == 1 else RankError), found
        if rank != 1 or own is RankError:
            assert re.search("rank 1 of 4 (failed|has another file)", str(found)), found


def saves_in_own_directory(folder):
    """Save to one directory, whose path is spelled differently on each rank."""
    rank = dist.get_rank()
    (folder / f"cwd{rank}").mkdir()
    os.chdir(folder / f"cwd{rank}")
    tensors = on_mesh({"w": torch.arange(8.0)}, [0, 1, 2, 3])
    save_sharded(tensors, folder / "out" if rank % 2 else "../out", overwrite=True)


def test_save_sharded_accepts_one_directory_in_several_spellings(four, tmp_path):
    four.run(saves_in_own_directory, tmp_path)
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.arange(8.0))


def test_save_sharded_rejects_a_part_without_a_process_group(tmp_path):
    part = annotated(torch.zeros(3), (6,), ((0,),), ((0,),), ((3,),))
    with pytest.raises(SaveError, match=r"`w`.*init_process_group"):
        save_sharded({"w": part}, tmp_path / "model")
    save_file({"w": torch.zeros(6)}, tmp_path / "w.safetensors")
    part += 1
    load_into({"w": part}, tmp_path / "w.safetensors")
    assert part.tolist() == [0, 0, 0]
    assert os.listdir(tmp_path) == ["w.safetensors"]


def loads_other_version(folder):
    # The mesh only makes this a call of all ranks.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)}
    ingot.torch.load_into(target, folder)
    return target["w"].full_tensor().tolist()


def test_load_into_reads_one_version_on_all_ranks(four, tmp_path):
    save_sharded({"w": torch.arange(8.0)}, tmp_path)
    assert four.run(loads_other_version, tmp_path) == [list(range(8))] * 4


def refuses_whole(path):
    own = on_mesh({"rows": torch.zeros(7, 5)}, [0, 1, 2, 3])
    for options in ({"verify": True}, {"expected_sha256": "0" * 64}, {"dtype": "F16"}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} is not supported if ranks") as caught:
            load_into(own, path, read_once="job", **options)
        assert caught.value.code == "not-by-ranks"
    load_into(own, path, read_once=False, verify=True)
    assert torch.equal(own["rows"].to_local(), values()["rows"].chunk(4)[dist.get_rank()])
    load_into(own, path, read_once="job", keys=["rows"])


def fail_to_read(path, read_once):
    def fail(done, total):
        if dist.get_rank() == 1:
            raise MemoryError("no room for it")

    load_into({"w": torch.empty(4, 4)}, path, read_once=read_once, progress=fail)


@pytest.mark.parametrize("read_once", ["job", "node"])
def test_load_into_raises_on_all_ranks_if_one_fails_to_read(four, tmp_path, read_once):
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    found = four.outcomes(fail_to_read, tmp_path / "model.safetensors", read_once, seconds=PROMPT)
    assert [type(one) for one in found] == [RankError, MemoryError, RankError, RankError]
    assert {one.code for one in found if isinstance(one, RankError)} == {"rank-failed"}


def test_load_into_refuses_options_of_whole_tensors_by_ranks(four, tmp_path):
    save_file({"rows": values()["rows"]}, tmp_path / "file", checksums=True)
    four.run(refuses_whole, tmp_path / "file")
