"""`load_into(patch=…)` of DTensors: each rank changes its part, as loading the new version would."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ingot
from ingot.remap import concat, select, stack
from ingot.torch import DeltaWriter, load_into, save_file

SHAPES = {"a": (16, 6), "b": (8, 6), "c": (3, 50), "e.0": (4, 4), "e.1": (4, 4), "f4": (8, 6), "s": ()}


def weights(step):
    generator = torch.Generator().manual_seed(5)
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    found["f4"] = torch.randint(0, 256, (8, 6), generator=generator, dtype=torch.uint8)
    for tensor in found.values():
        tensor.view(-1)[:: 7 if step else 10_000] += step
    found["c"] += step
    found["f4"] = found["f4"].view(torch.float4_e2m1fn_x2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    for step in range(2):
        save_file(weights(step), folder / f"{step}.safetensors", checksums="xxh3")
    names = [folder / name for name in ("0.safetensors", "1.safetensors", "patch.safetensors")]
    ingot.delta.diff(*names)
    return folder


PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicas": [Replicate()],
    "both": [Shard(0), Shard(1)],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
}
RULES = [concat("ab", ["a", "b"], shard="each"), stack("e", "e.{n}"), select("*")]


def empty(shapes, mesh, placements):
    """Return DTensors of these shapes, and plain tensors of those without dimensions."""
    found = {}
    for name, (shape, dtype) in shapes.items():
        whole = torch.zeros(shape, dtype=torch.uint8 if name == "f4" else dtype)
        if shape:
            local = whole
            for size, rank, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
                if not placement.is_replicate():
                    local = local.chunk(size, placement.dim)[rank]
            local = local.clone().view(dtype)
            whole = whole.view(dtype)
            found[name] = DTensor.from_local(
                local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False
            )
        else:
            found[name] = whole
    return found


@pytest.mark.parametrize("remap", [None, RULES], ids=["stored", "fused"])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_load_into_patches_the_part_of_each_rank(folder, as_rank, kind, remap):
    whole = ingot.torch.load_file(folder / "0.safetensors", remap=remap)
    # Left out: what cannot be divided by ranks, and strided shards of joined parts.
    left_out = ["c", "ab", "e"] if kind == "strided" and remap else ["c"]
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in whole.items() if name not in left_out}
    mesh_shape = (2,) * len(PLACEMENTS[kind])
    options = {"remap": remap, "drop": left_out}
    for rank in range(2 ** len(mesh_shape)):
        with as_rank(rank, 2 ** len(mesh_shape)):
            mesh = init_device_mesh("cpu", mesh_shape)
            target, expected = (empty(shapes, mesh, PLACEMENTS[kind]) for _ in range(2))
            version = load_into(target, folder / "0.safetensors", read_once=False, **options).version
            load_into(target, version, patch=folder / "patch.safetensors", **options)
            load_into(expected, folder / "1.safetensors", read_once=False, **options)
            for name, one in expected.items():
                found, wanted = (
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                    for tensor in (target[name], one)
                )
                found, wanted = (tensor.reshape(-1).view(torch.uint8) for tensor in (found, wanted))
                assert torch.equal(found, wanted), (name, rank)


def test_load_into_counts_the_write_to_a_dtensor(folder, as_rank):
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        target = empty({"a": (SHAPES["a"], torch.bfloat16)}, mesh, [Shard(0)])
        before = target["a"]._version
        base = ingot.delta.info(folder / "patch.safetensors").base
        load_into(target, base, patch=folder / "patch.safetensors", keys="a")
        assert target["a"]._version == before + 1


def test_load_into_needs_a_version_for_parts(folder, as_rank):
    with as_rank(1, 2):
        target = empty({"a": (SHAPES["a"], torch.bfloat16)}, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ingot.OptionError) as raised:
            load_into(target, patch=folder / "patch.safetensors", keys="a")
        assert raised.value.code == "no-version"


def patch_together(folder):
    """Patch on this rank, after the ranks loaded together."""
    target = empty({"a": (SHAPES["a"], torch.bfloat16)}, init_device_mesh("cpu", (2,)), [Shard(0)])
    loaded = load_into(target, folder / "0.safetensors", read_once="job", keys="a")
    loaded = load_into(target, loaded.version, patch=folder / "patch.safetensors", keys="a")
    rank = torch.distributed.get_rank()
    assert torch.equal(target["a"].to_local(), weights(1)["a"].chunk(2)[rank])
    return loaded.version


def test_load_into_returns_the_version_to_ranks_that_load_together(folder, two):
    assert two.run(patch_together, folder) == [ingot.delta.info(folder / "patch.safetensors").result] * 2


class Tied(torch.nn.Module):
    """A module with two names of one DTensor, another one, and a plain tensor."""

    def __init__(self, mesh):
        super().__init__()
        shapes = {
            "a": (SHAPES["a"], torch.bfloat16),
            "c": ((2, 50), torch.bfloat16),
            "s": ((), torch.float32),
        }
        for name, tensor in empty(shapes, mesh, [Shard(0)]).items():
            self.register_buffer(name, tensor)
        self.register_buffer("tied", self.a)


def write_together(folder):
    """Write three steps on this rank. The second step fails."""
    mesh = init_device_mesh("cpu", (2,))
    model, rank = Tied(mesh), torch.distributed.get_rank()
    writer = DeltaWriter(model, folder / "weights")
    versions = []
    for step in range(3):
        model.a.to_local()[3, step] += rank + 1
        model.s.fill_(step)
        torch.distributed.barrier()
        if step == 1 and rank == 0:
            (folder / "weights").rename(folder / "moved")
        writer.save(step)
        if step == 1:
            with pytest.raises(OSError if rank == 0 else ingot.errors.RankError, match="weights"):
                writer.commit()
            torch.distributed.barrier()
            if rank == 0:
                (folder / "moved").rename(folder / "weights")
        else:
            writer.commit()
        versions.append(writer.version)
    return versions, model.a.to_local().float().tolist()


def test_delta_writer_writes_the_whole_tensors_of_ranks(tmp_path, two):
    (versions, first), (others, second) = two.run(write_together, tmp_path)
    folder = tmp_path / "weights"
    assert versions == others
    assert versions[0] == versions[1] != versions[2]
    assert sorted(path.name for path in folder.iterdir()) == [
        "patch-00000002.safetensors",
        "whole-00000000.safetensors",
    ]
    found = ingot.torch.load_file(folder / "whole-00000000.safetensors")
    assert sorted(found) == ["a", "c", "s"]
    version = load_into(found, versions[0], patch=folder / "patch-00000002.safetensors").version
    assert version == versions[2]
    assert found["a"].float().tolist() == first + second
    assert found["s"].item() == 2


def write_differing(folder):
    mesh = init_device_mesh("cpu", (2,))
    rank = torch.distributed.get_rank()
    tensors = empty({f"a{rank}": (SHAPES["a"], torch.bfloat16)}, mesh, [Shard(0)])
    writer = DeltaWriter(tensors, folder / "weights")
    message = r"has other tensors than rank 0: expected a0 .*, found a1 "
    with pytest.raises(ingot.errors.RankError, match=message):
        writer.save(0)


def test_delta_writer_refuses_ranks_with_other_tensors(tmp_path, two):
    two.run(write_differing, tmp_path)
    assert not [*(tmp_path / "weights").iterdir()]


def write_without_memory(folder):
    """Write on this rank. The first has no memory for whole tensors."""
    rank = torch.distributed.get_rank()
    shapes = dict.fromkeys(["a", "b"], (SHAPES["a"], torch.bfloat16))
    tensors = empty(shapes, init_device_mesh("cpu", (2,)), [Shard(0)])
    writer = DeltaWriter(tensors, folder / "weights")
    error = ingot.errors.RankError if rank else MemoryError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda _: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(error, match="full"):
            writer.save(0)
    writer.save(0)
    writer.commit()
    return writer.version


def test_delta_writer_raises_on_all_ranks_if_the_first_has_no_memory(tmp_path, two):
    first, second = two.run(write_without_memory, tmp_path)
    assert first == second
    assert len([*(tmp_path / "weights").iterdir()]) == 1


def write_outside(folder):
    rank = torch.distributed.get_rank()
    mesh = DeviceMesh("cpu", [1])
    tensors = empty({"a": (SHAPES["a"], torch.bfloat16)}, mesh, [Shard(0)]) if rank else None
    tensors = tensors or {"a": DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], run_check=False)}
    with pytest.raises((ingot.SaveError, ingot.errors.RankError), match="not in the mesh"):
        DeltaWriter(tensors, folder / "weights").save(0)


def test_delta_writer_refuses_a_mesh_without_a_rank(tmp_path, two):
    two.run(write_outside, tmp_path)
