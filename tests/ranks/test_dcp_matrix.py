"""Every writer against every reader, with the cases of torch's tests of its Hugging Face storage and more.

Each case runs through `ingot.dcp` and through torch's classes. Ours must pass all cases. `STOCK_FAILS` lists
the results of torch's classes that differ; a listed case that passes is a failure too.
"""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ingot.dcp
from ingot.torch import save_file

# torch warns of each save and load without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64")
SHAPES = {"scalar": (), "one": (1,), "rows": (7, 5), "cube": (4, 3, 6), "empty": (0, 3)}
WRITERS = ("ingot whole", "ingot parts", "torch parts", "torch consolidated")
READERS = ("ingot", "torch")

# Known results of torch's storage: by tensor, writer and reader.
STOCK_FAILS = {
    ("torch consolidated", "other dtypes"): "raises",
    ("torch consolidated", "scalar"): "differs",
    # This case of a listed pattern passes.
    ("torch consolidated", "complex64", "empty"): "same",
}


def writer(kind, path):
    if kind == "torch parts":
        return HuggingFaceStorageWriter(str(path), save_distributed=True)
    if kind == "torch consolidated":
        return HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    return ingot.dcp.Writer(path, whole=kind == "ingot whole")


def reader(kind, path):
    return ingot.dcp.Reader(path) if kind == "ingot" else HuggingFaceStorageReader(str(path))


def made(dtype, shape):
    """Return nonzero values of any dtype: arbitrary bytes, except for dtypes with invalid bytes."""
    dtype, count = getattr(torch, dtype), int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    numbers = torch.arange(1, count + 1)
    return numbers.to(torch.float32 if dtype.is_floating_point else torch.int64).to(dtype).view(shape)


def placed(tensor, mesh, placements):
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def raw(tensor):
    found = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.contiguous().reshape(-1).view(torch.uint8)


def outcome(work):
    """Return the results of all ranks."""
    logging.disable(logging.ERROR)
    try:
        found = "same" if work() else "differs"
    except BaseException:
        found = "raises"
    finally:
        logging.disable(logging.NOTSET)
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, found)
    return next((one for one in ("raises", "differs") if one in each), "same")


def dtypes_and_shapes(folder, dtypes):
    """Return the result for each dtype and shape, each in a checkpoint of its own."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for dtype in dtypes:
        for shape in SHAPES:
            tensor = made(dtype, SHAPES[shape])
            placements = [Shard(0)] if tensor.dim() else [Replicate()]
            for by in WRITERS:
                path = folder / f"{by} {dtype} {shape}"
                saved = outcome(
                    lambda by=by, path=path, tensor=tensor, placements=placements: (
                        dcp.save({"a": placed(tensor, mesh, placements)}, storage_writer=writer(by, path))
                        is not None
                    )
                )

                def loads(to, path=path, tensor=tensor, placements=placements):
                    target = {"a": placed(torch.zeros_like(tensor), mesh, placements)}
                    dcp.load(target, storage_reader=reader(to, path))
                    return torch.equal(raw(target["a"]), raw(placed(tensor, mesh, placements)))

                for to in READERS:
                    key = by, to, dtype, shape
                    found[key] = saved if saved != "same" else outcome(lambda to=to, loads=loads: loads(to))
    return found


def expected(by, to, dtype, shape):
    if "torch" not in (to, *by.split()):
        return "same"
    of_dtype = "other dtypes" if dtype in OTHERS else dtype
    for key in ((by, dtype, shape), (by, of_dtype), (by, shape), (to, of_dtype), (to, shape)):
        if key in STOCK_FAILS:
            return STOCK_FAILS[key]
    return "same"


SOME = ("float32", "bfloat16", "int64", "bool")


@pytest.mark.parametrize(
    "dtypes",
    [
        SOME,
        pytest.param(tuple(dtype for dtype in FLOATS + OTHERS if dtype not in SOME), marks=pytest.mark.slow),
    ],
    ids=["some dtypes", "the other dtypes"],
)
def test_readers_read_every_dtype_and_shape_of_every_writer(four, tmp_path, dtypes):
    found = four.run(dtypes_and_shapes, tmp_path, dtypes, seconds=300)[0]
    differing = {key: one for key, one in found.items() if one != expected(*key)}
    assert not differing


PLACEMENTS = [
    *([Shard(0)], [Shard(1)], [Replicate()]),
    *([one, other] for one in (Replicate(), Shard(0)) for other in (Replicate(), Shard(0))),
    *([Shard(1), Shard(0)], [Shard(0), Shard(1)]),
]


def resharded(folder, shape):
    """Load every placement into every other one, on a line of ranks and on a grid."""
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2))}
    whole, found = made("float32", shape), {}
    for by in ("ingot whole", "ingot parts", "torch parts"):
        for number, placements in enumerate(PLACEMENTS):
            path = folder / f"{by} {number}"
            state = {"a": placed(whole, meshes[len(placements)], placements)}
            dcp.save(state, storage_writer=writer(by, path))
            for other in PLACEMENTS:
                for to in READERS:
                    target = {"a": placed(torch.zeros(shape), meshes[len(other)], other)}
                    dcp.load(target, storage_reader=reader(to, path))
                    same = torch.equal(raw(target["a"]), raw(placed(whole, meshes[len(other)], other)))
                    found[by, to, str(placements), str(other)] = same
    return found


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((5, 6), id="uneven"),
        # Most ranks have no element of this tensor.
        pytest.param((1, 3), id="empty shards", marks=pytest.mark.slow),
        pytest.param((4, 4), id="even", marks=pytest.mark.slow),
    ],
)
def test_readers_load_every_placement_from_every_other(four, tmp_path, shape):
    for found in four.run(resharded, tmp_path, shape, seconds=300):
        assert len(found) == 3 * 2 * len(PLACEMENTS) ** 2
        assert [key for key, same in found.items() if not same] == []


def state():
    """Return a model like those of torch's tests, nested as in a trainer's state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 5), torch.nn.Linear(5, 1), torch.nn.EmbeddingBag(5, 10)
    ).state_dict()
    return {"model": model, "steps": torch.tensor(7), "ema": [torch.ones(3), torch.arange(4)]}


def flat(state):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)[0]


def zeros(state):
    return torch.utils._pytree.tree_map(torch.zeros_like, state)


def equal(found, whole):
    found, whole = flat(found), flat(whole)
    return found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def nested(path, by, to):
    dcp.save(state(), storage_writer=writer(by, path))
    target = zeros(state())
    dcp.load(target, storage_reader=reader(to, path))
    return equal(target, state())


def nothing_given(path, by, to):
    """Load into an empty dict."""
    dcp.save(flat(state()), storage_writer=writer(by, path))
    return equal(_load_state_dict_from_keys(storage_reader=reader(to, path)), flat(state()))


def some_names(path, by, to):
    dcp.save(flat(state()), storage_writer=writer(by, path))
    found = _load_state_dict_from_keys({"steps"}, storage_reader=reader(to, path))
    return equal(found, {"steps": torch.tensor(7)})


def partial(path, by, to):
    dcp.save(flat(state()), storage_writer=writer(by, path))
    target = {**zeros(flat(state())), "more": torch.full((3,), 5.0)}
    dcp.load(target, storage_reader=reader(to, path), planner=DefaultLoadPlanner(allow_partial_load=True))
    return equal(target, {**flat(state()), "more": torch.full((3,), 5.0)})


def some_of_the_file(path, by, to):
    dcp.save(flat(state()), storage_writer=writer(by, path))
    target = {"steps": torch.tensor(0)}
    dcp.load(target, storage_reader=reader(to, path))
    return equal(target, {"steps": torch.tensor(7)})


def plans_kept(path, by, to):
    """Save with cached plans, which ranks do not send again. Change the values, and later the names."""
    # The cache is shared by all writers of a process.
    for kept in vars(SavePlanner).values():
        if isinstance(kept, dict):
            kept.clear()
    for number in range(4):
        whole = {name: tensor + number for name, tensor in flat(state()).items()}
        if number > 1:
            # Only the plan of the first rank has the new tensor.
            whole["late"] = torch.ones(number)
        shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        dcp.save(whole, storage_writer=writer(by, path), planner=DefaultSavePlanner(enable_plan_caching=True))
        target = zeros(whole)
        dcp.load(target, storage_reader=reader(to, path))
        if not equal(target, whole):
            return False
        dist.barrier()
    return True


def tied(path, by, to):
    """Save a tensor with two names, and load it into another tensor with these two names."""
    weight = torch.arange(12.0).view(3, 4)
    dcp.save({"embed": weight, "head": weight}, storage_writer=writer(by, path))
    one = torch.zeros(3, 4)
    target = {"embed": one, "head": one}
    dcp.load(target, storage_reader=reader(to, path))
    return equal(target, {"embed": weight, "head": weight})


class Halved(DefaultSavePlanner):
    """A planner that saves in another dtype, as in torch's documentation."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data.properties.dtype == torch.float32:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, item):
        tensor = super().resolve_data(item)
        return tensor.half() if tensor.dtype == torch.float32 else tensor


def converted(path, by, to):
    dcp.save(flat(state()), storage_writer=writer(by, path), planner=Halved())
    target = zeros(flat(state()))
    dcp.load(target, storage_reader=reader(to, path))
    halved = {
        name: tensor.half().float() if tensor.dtype == torch.float32 else tensor
        for name, tensor in flat(state()).items()
    }
    return equal(target, halved)


class Buffering(DefaultLoadPlanner):
    """A planner that reads into its own buffer, and copies a full buffer to its destination."""

    def resolve_tensor(self, item):
        return torch.empty_like(super().resolve_tensor(item), device="cpu")

    def commit_tensor(self, item, tensor):
        self.state_dict[item.dest_index.fqn].copy_(tensor)


def put_in_place(path, by, to):
    dcp.save(flat(state()), storage_writer=writer(by, path))
    target = zeros(flat(state()))
    dcp.load(target, storage_reader=reader(to, path), planner=Buffering())
    return equal(target, flat(state()))


class Renamed(DefaultLoadPlanner):
    """A planner that loads tensors under other names."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {f"saved.{name}": tensor for name, tensor in self.state_dict.items()}


def renamed(path, by, to):
    whole = {f"saved.{name}": tensor for name, tensor in flat(state()).items()}
    dcp.save(whole, storage_writer=writer(by, path))
    target = zeros(flat(state()))
    dcp.load(target, storage_reader=reader(to, path), planner=Renamed())
    return equal(target, flat(state()))


def in_the_background(path, by, to):
    whole = flat(state())
    saved = dcp.async_save(whole, storage_writer=writer(by, path))
    for tensor in whole.values():
        tensor.zero_()
    saved.result()
    target = zeros(flat(state()))
    dcp.load(target, storage_reader=reader(to, path))
    return equal(target, flat(state()))


PLANNERS = (
    *(nested, nothing_given, some_names, partial, some_of_the_file, plans_kept, tied),
    *(converted, put_in_place, renamed, in_the_background),
)
# The same for torch's storage.
STOCK_FAILS_TO = {
    # torch's reader has no entries for names that are not nested.
    (some_names, "torch reads"): "raises",
}


def planned(folder):
    found = {}
    for case in PLANNERS:
        for by in ("ingot whole", "ingot parts", "torch parts"):
            for to in READERS:
                path = folder / f"{case.__name__} {by} {to}"
                found[case.__name__, by, to] = outcome(lambda: case(path, by, to))  # noqa: B023
    return found


def test_planners_work_with_every_writer_and_reader(four, tmp_path):
    fails = {(case.__name__, what): how for (case, what), how in STOCK_FAILS_TO.items()}
    for key, one in four.run(planned, tmp_path, seconds=300)[0].items():
        case, by, to = key
        expected = fails.get((case, f"{to} reads"), fails.get((case, f"{by} writes"), "same"))
        assert one == expected, key


def keeps_others(path):
    """Save with plans that another writer has cached."""
    for kept in vars(SavePlanner).values():
        if isinstance(kept, dict):
            kept.clear()
    for number, by in enumerate(("torch parts", "ingot whole", "ingot parts")):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(flat(state()), storage_writer=writer(by, path / str(number)), planner=planner)


def test_writer_rejects_plans_cached_for_another_writer(four, tmp_path):
    for found in four.outcomes(keeps_others, tmp_path):
        assert isinstance(found, dcp.CheckpointException)
        assert "torch has cached plans of another planner or writer" in str(found)


def reads_a_stray_file(path):
    dcp.save(flat(state()), storage_writer=ingot.dcp.Writer(path, max_shard_size=100))
    if dist.get_rank() == 0:
        save_file({"steps": torch.tensor(8)}, path / "a-stray.safetensors")
    dist.barrier()

    def loads(to):
        target = {"steps": torch.tensor(0)}
        dcp.load(target, storage_reader=reader(to, path))
        return int(target["steps"]) == 7

    return {to: outcome(lambda to=to: loads(to)) for to in READERS}


def test_reader_reads_by_the_index(four, tmp_path):
    found = four.run(reads_a_stray_file, tmp_path)[0]
    assert found["ingot"] == "same"
    assert found["torch"] in ("differs", "raises")
    assert "a-stray.safetensors" in os.listdir(tmp_path)
