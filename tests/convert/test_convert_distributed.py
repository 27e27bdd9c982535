"""Directories of torch.distributed.checkpoint: converted, and loaded as they are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import ingot
import ingot.numpy
from ingot._base.dtypes import CODES
from ingot._convert.limits import Budget, limits
from ingot._convert.source import Contents, Entry, Options, Region
from ingot._convert.sources.distributed import _Box, _Folder, _Joined
from ingot.torch import load_file
from support.errors import raises
from support.mutants import mutant
from support.record import note

from .conftest import Payload

# torch warns of each save without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

# Mutants of `.metadata`; `make nightly` tries more.
FILES = int(os.environ.get("INGOT_FILES", "1500")) // 10


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "turned": torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
        "part": torch.arange(40.0)[7:30:2],
        "few": {"list": [torch.ones(2).half(), {"x": torch.zeros(3).to(torch.float8_e4m3fn)}]},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "step": 5,
        "rng": torch.get_rng_state(),
    }


def saved(tree: dict[str, Any], path: str = "step_1") -> str:
    dcp.save(tree, storage_writer=FileSystemWriter(path, single_file_per_rank=True))
    return path


def flat(tree: Any, *keys: str) -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {".".join(keys): tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {name: one for key, inner in pairs for name, one in flat(inner, *keys, str(key)).items()}


def by_torch(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors that torch's own loader reads."""
    dcp_to_torch_save(path, "whole.pt")
    return flat(torch.load("whole.pt", weights_only=False))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(found[name]), raw(tensor)), name


def edited(change: Callable[[Metadata], object], tree: dict[str, Any] | None = None) -> str:
    """Save a checkpoint, and change its metadata."""
    folder = saved(tree or {"w": torch.arange(24.0).view(4, 6), "other": torch.ones(3)})
    path = Path(folder, ".metadata")
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def stored(metadata: Metadata, name: str = "w") -> Any:
    return metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == name)]


def chunk(metadata: Metadata, offsets: list[int], sizes: list[int]) -> None:
    """Set the only box of the tensor `w`."""
    (key,) = [key for key in metadata.storage_data if key.fqn == "w"]
    box = metadata.state_dict_metadata["w"].chunks[0]  # type: ignore[union-attr]
    box.offsets, box.sizes = torch.Size(offsets), torch.Size(sizes)
    metadata.storage_data[MetadataIndex("w", offsets)] = metadata.storage_data.pop(key)


def test_convert_reads_every_tensor_of_a_distributed_checkpoint() -> None:
    folder = saved(state())
    report = ingot.convert(folder, "out.safetensors")
    assert report.source_format == "distcp"
    same(load_file("out.safetensors"), by_torch(folder))
    others = {one.name: (one.kind, one.value) for one in report.left_out}
    assert others["step"] == ("int", "5")
    assert others["optim.param_groups.0.lr"] == ("float", "0.001")
    assert all(name == "step" or name.startswith("optim.param_groups.0.") for name in others)


@pytest.mark.parametrize("path", ["step_1", "step_1/", "step_1/.metadata"])
def test_convert_takes_the_directory_and_its_metadata(path: str) -> None:
    saved({"w": torch.ones(2)})
    assert ingot.convert(path, "out.safetensors").tensors == 1


def test_load_file_reads_a_distributed_checkpoint() -> None:
    folder = saved(state())
    expected = by_torch(folder)
    same(load_file(folder), expected)
    arrays = ingot.numpy.load_file(folder, keys="model.*")
    assert arrays.keys() == {name for name in expected if name.startswith("model.")}
    with ingot.safe_open(folder, "pt") as file:
        part = file.get_slice("model.0.weight")[1:, 2:]
    assert torch.equal(part, expected["model.0.weight"][1:, 2:])


def test_load_file_names_a_tensor_without_a_dtype_in_files() -> None:
    folder = saved({"w": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)})
    with raises(ingot.ConversionError, "complex128", code="unsupported-dtype", tensor="wide") as caught:
        load_file(folder)
    assert "ingot.convert with drop= writes a file of the other tensors" in caught.value.__notes__
    with raises(ingot.ConversionError, "complex128", code="unsupported-dtype", tensor="wide"):
        ingot.convert(folder, "out.safetensors")
    assert ingot.convert(folder, "out.safetensors", drop="wide").tensors == 1


def test_load_file_prefers_a_file_of_tensors_beside_the_metadata() -> None:
    folder = saved({"w": torch.ones(2)})
    ingot.torch.save_file({"v": torch.ones(1)}, f"{folder}/model.safetensors")
    assert load_file(folder).keys() == {"v"}


def test_convert_reads_objects_that_contain_tensors() -> None:
    inner = torch.arange(3.0)
    folder = saved({"w": torch.ones(2), "pair": (inner, "x"), "none": None})
    report = ingot.convert(folder, "out.safetensors")
    assert torch.equal(load_file("out.safetensors")["pair.0"], inner)
    assert {(one.name, one.kind) for one in report.left_out} == {("pair.1", "str"), ("none", "NoneType")}


def test_convert_reads_metadata_of_older_versions_of_torch() -> None:
    expected = torch.arange(24.0).view(4, 6)
    folder = saved({"w": expected})
    path = Path(folder, ".metadata")
    raw = pickle.dumps(pickle.loads(path.read_bytes()), 2)
    new = b"ctorch.distributed.checkpoint.metadata\n"
    old = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    for name in (b"TensorProperties\n", b"_MEM_FORMAT_ENCODING\n"):
        assert new + name in raw
        raw = raw.replace(new + name, old + name.removeprefix(b"_"))
    path.write_bytes(raw)
    same(load_file(folder), {"w": expected})


def _cuts(size: int, dice: random.Random) -> list[slice]:
    ends = sorted({0, size, *(dice.randrange(size + 1) for _ in range(dice.randrange(3)))})
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


@pytest.mark.parametrize("seed", range(4))
def test_joined_boxes_have_the_bytes_of_every_range(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        shape = tuple(dice.randrange(1, 6) for _ in range(dice.randrange(4)))
        whole = numpy.arange(math.prod(shape), dtype="<i4").reshape(shape) * 7919
        boxes, entries, data = [], [], b""
        for place in itertools.product(*(_cuts(size, dice) for size in shape)):
            part = numpy.ascontiguousarray(whole[place])
            region = Region("boxes", len(data), part.nbytes)
            boxes.append(_Box(tuple(side.start for side in place), whole[place].shape, region))
            is_plain = dice.random() < 0.7
            values = None if is_plain else (lambda part=part: part)
            entries.append(Entry("w", "I32", boxes[-1].sizes, values, region=region if is_plain else None))
            data += part.tobytes()
        Path("boxes").write_bytes(data)
        budget = Budget("", limits(1, None))
        contents = Contents("step_1/.metadata", "", Options(budget, False))
        joined = _Joined(_Folder(contents, {}, budget), "w", "I32", shape, boxes)
        monkeypatch.setattr(joined, "_entry", entries.__getitem__)
        assert numpy.array_equal(joined.read(), whole)
        for _ in range(8):
            begin, end = sorted(dice.choices(range(whole.nbytes + 1), k=2))
            assert joined.span(begin, end).tobytes() == whole.tobytes()[begin:end], (shape, begin, end)


def test_load_file_reads_packed_elements() -> None:
    packed = torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2)
    folder = saved({"w": packed})
    ingot.torch.save_file({"w": packed}, "expected.safetensors")
    ingot.convert(folder, "out.safetensors")
    for path in (folder, "out.safetensors"):
        assert torch.equal(load_file(path)["w"].view(torch.uint8), packed.view(torch.uint8))


def test_load_file_rejects_to_map_a_distributed_checkpoint() -> None:
    folder = saved({"w": torch.ones(2)})
    with raises(ingot.OptionError, "a distributed checkpoint cannot be mapped", code="unmappable"):
        load_file(folder, backend="mmap")


@pytest.mark.parametrize("path", ["step_1", "step_1/.metadata"])
def test_convert_reads_the_metadata_of_megatron(path: str) -> None:
    expected = torch.arange(24.0).view(4, 6)
    metadata = Path(saved({"w": expected}), ".metadata")
    raw = pickle.dumps(pickle.loads(metadata.read_bytes()), 2)
    ours, theirs = (
        f"c{module}\n{name}\n".encode()
        for module, name in (
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        )
    )
    assert ours in raw
    metadata.write_bytes(raw.replace(ours, theirs))
    ingot.convert(path, "out.safetensors")
    same(load_file("out.safetensors"), {"w": expected})


def test_load_file_notices_a_checkpoint_that_is_replaced() -> None:
    folder = saved({"w": torch.arange(100_000.0)})
    with ingot.safe_open(folder, "pt") as file:
        shutil.rmtree(folder)
        with pytest.raises(ingot.StorageError):
            file.get_tensor("w")


def test_convert_names_a_file_of_a_distributed_checkpoint() -> None:
    saved({"w": torch.ones(2)})
    with raises(ingot.ConversionError, "expected its directory", code="part"):
        ingot.convert("step_1/__0_0.distcp", "out.safetensors")


def _compressed(metadata: Metadata) -> None:
    stored(metadata).transform_descriptors = ["zstd.1"]


def _moved(where: Any) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(stored(metadata), "relative_path", where)


def _shape(*sizes: int) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size(sizes))


def _twice(metadata: Metadata) -> None:
    boxes = metadata.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    boxes.append(boxes[0])


def _on_other(metadata: Metadata) -> None:
    one, other = stored(metadata), stored(metadata, "other")
    one.offset, one.length = other.offset, other.length


def _dtype(metadata: Metadata) -> None:
    properties = metadata.state_dict_metadata["w"].properties  # type: ignore[union-attr]
    metadata.state_dict_metadata["w"].properties = dataclasses.replace(properties, dtype=torch.float16)  # type: ignore[union-attr]


def _transformed(by: Any) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(stored(metadata), "transform_descriptors", by)


# Descriptions that torch never writes: nothing of the directory is read.
MALFORMED: dict[str, tuple[Callable[[Metadata], object], str, str]] = {
    "negative": (lambda m: setattr(stored(m), "offset", -1), "unreadable", "without a file, a position"),
    "after all files": (lambda m: setattr(stored(m), "offset", 10**5000), "unreadable", "a position"),
    "longer than files": (lambda m: setattr(stored(m), "length", 2**63), "unreadable", "and a length"),
    "in a list": (_moved(["__0_0.distcp"]), "unreadable", "without a file"),
    "in lists": (_moved([["x"]]), "unreadable", "without a file"),
    "of many dimensions": (_shape(*[1] * 2000), "unreadable", "2000 dimensions: expected 63 or fewer"),
    "of no size": (_shape(10**5000), "unreadable", "without sizes"),
    "of another version": (lambda m: setattr(m, "version", "2.0.0"), "unreadable", "version is '2.0.0'"),
}
HOSTILE: dict[str, tuple[Callable[[Metadata], object], str, str]] = {
    "unknown extension": (_transformed([["x"]]), "transformed", "an unknown extension"),
    "compressed": (_compressed, "transformed", "zstd.1"),
    "above": (_moved("../other/__0_0.distcp"), "outside", "leaves the folder"),
    "of no characters": (_moved("a\ud800"), "outside", "a character that is not allowed"),
    "of many folders": (_moved("a/" * 500_000), "outside", "has more than 4,096 characters"),
    "absolute": (_moved("/etc/passwd"), "outside", "leaves the folder"),
    "missing": (_moved("__1_0.distcp"), "missing-file", "no such file"),
    "after the end": (lambda m: setattr(stored(m), "offset", 2**62), "truncated", "truncated"),
    "too long": (lambda m: setattr(stored(m), "length", 2**62), "truncated", "truncated"),
    "short": (lambda m: setattr(stored(m), "length", 40), "size-mismatch", "needs 96 bytes"),
    "cut": (lambda m: setattr(stored(m), "length", 400), "unreadable", "tensor `w`: not a ZIP archive"),
    "of another": (_on_other, "overlap", "overlaps another"),
    "larger": (_shape(5, 6), "chunks", r"no box has the element at \[4, 0\]"),
    "huge": (_shape(2**40, 6), "chunks", "no box has"),
    "smaller": (_shape(3, 6), "chunks", "not inside"),
    "flat": (_shape(24), "chunks", "not inside"),
    "shifted": (lambda m: chunk(m, [1, 0], [4, 6]), "chunks", "not inside"),
    "hole": (lambda m: chunk(m, [1, 0], [3, 6]), "chunks", r"no box has the element at \[0, 0\]"),
    "twice": (_twice, "chunks", "2 boxes have"),
    "huge box": (
        lambda m: (chunk(m, [0, 0], [2**40, 6]), _shape(2**40, 6)(m)),
        "size-mismatch",
        "needs 26388279066624 bytes",
    ),
    "other dtype": (_dtype, "unreadable", r"expected a box of F16 \[4, 6\], found F32"),
    "unlisted": (
        lambda m: m.storage_data.pop(next(key for key in m.storage_data if key.fqn == "w")),
        "missing-chunk",
        "no file is listed",
    ),
    **MALFORMED,
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_convert_rejects_a_wrong_description(fault: str) -> None:
    change, code, words = HOSTILE[fault]
    folder = edited(change)
    for call in (load_file, lambda path: ingot.convert(path, "out.safetensors")):
        tracemalloc.start()
        with raises((ingot.ConversionError, ingot.StorageError), words) as caught:
            call(folder)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        error = caught.value if isinstance(caught.value, ingot.ConversionError) else caught.value.__cause__
        assert isinstance(error, ingot.ConversionError)
        assert error.code == code
        assert code in ("unreadable", "outside") or error.tensor in ("w", "other")
        assert peak < 16 << 20
    assert not Path("out.safetensors").exists()
    # The fault of one tensor does not bar the others.
    if error.tensor == "w" and fault not in ("too long", "of another", *MALFORMED):
        assert ingot.convert(folder, "out.safetensors", keys="other").tensors == 1


def test_convert_bounds_the_work_for_crossing_boxes() -> None:
    def crossing(metadata: Metadata) -> None:
        tensor: Any = metadata.state_dict_metadata["w"]
        tensor.size = torch.Size([8000, 8000])
        box = type(tensor.chunks[0])
        tensor.chunks = [box(torch.Size([at, 0]), torch.Size([8000 - at, 8000])) for at in range(8000)]

    with raises(ingot.ConversionError, code="chunks"):
        ingot.convert(edited(crossing), "out.safetensors")


def itself(times: int) -> bytes:
    """Return a pickle of a record that contains a list, which contains itself many times."""
    head = b"\x80\4ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\1\0\0\0x"
    return head + b"]q\1(" + b"h\1" * times + b"esb."


def test_load_file_bounds_the_work_for_metadata_beside_large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved({"w": torch.ones(2)})
    Path(folder, ".metadata").write_bytes(itself(500))
    monkeypatch.setattr("ingot._convert.served.source_nbytes", lambda *given: 1 << 40)
    tracemalloc.start()
    with raises(ingot.ConversionError, "64 times its size", code="too-large"):
        load_file(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_convert_bounds_the_work_for_a_pickle_beside_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile("x.pt", "w") as archive:
        archive.writestr("x/data.pkl", itself(500))
    monkeypatch.setattr("ingot._convert.conversion.source_nbytes", lambda *given: 1 << 40)
    with raises(ingot.ConversionError, "64 times its size", code="too-large"):
        ingot.convert("x.pt", "out.safetensors")


def test_convert_rejects_two_positions_of_one_box() -> None:
    folder = saved({"w": torch.ones(2), "other": torch.ones(2)})
    path = Path(folder, ".metadata")
    metadata = pickle.loads(path.read_bytes())
    records = metadata.storage_data
    # The keys are equal only after the change, and a pickle may repeat a key.
    next(key for key in records if key.fqn == "other").__dict__["fqn"] = "w"
    path.write_bytes(pickle.dumps(metadata))
    with raises(ingot.ConversionError, "two positions of one box", tensor="w"):
        ingot.convert(folder, "out.safetensors")


def test_convert_lists_records_without_a_description() -> None:
    folder = edited(lambda metadata: metadata.state_dict_metadata.pop("w"))
    report = ingot.convert(folder, "out.safetensors")
    assert [(one.name, one.kind) for one in report.left_out] == [("w", "record")]


@pytest.mark.parametrize(
    ("name", "code"), [("__metadata__", "reserved-name"), ("a\ud800", "invalid-unicode")]
)
def test_load_file_and_convert_reject_a_name_that_files_lack(name: str, code: str) -> None:
    folder = edited(lambda metadata: _renamed(metadata, name))
    for call in (load_file, lambda path: ingot.convert(path, "out.safetensors")):
        with raises(ingot.ConversionError, code=code, tensor=name):
            call(folder)


def _renamed(metadata: Metadata, name: str) -> None:
    described: Any = metadata.state_dict_metadata
    described[name] = described.pop("w")
    key = next(key for key in metadata.storage_data if key.fqn == "w")
    metadata.storage_data[MetadataIndex(name, key.offset)] = metadata.storage_data.pop(key)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_convert_rejects_metadata_that_is_a_pipe() -> None:
    folder = saved({"w": torch.ones(2)})
    Path(folder, ".metadata").unlink()
    os.mkfifo(f"{folder}/.metadata")
    with raises(ingot.ConversionError, "expected one, or an index"):
        ingot.convert(folder, "out.safetensors")


def _joined(metadata: Metadata) -> None:
    """Make one tensor of `a` and `b`."""
    described: Any = metadata.state_dict_metadata
    whole, part = described.pop("a"), described.pop("b")
    described["w"] = whole
    part.chunks[0].offsets = torch.Size([50_000])
    whole.size = torch.Size([100_000])
    whole.chunks += part.chunks
    records = {key.fqn: one for key, one in metadata.storage_data.items()}
    metadata.storage_data = {
        MetadataIndex("w", [0]): records["a"],
        MetadataIndex("w", [50_000]): records["b"],
    }


def test_load_file_notices_a_replaced_file_of_any_rank() -> None:
    expected = torch.arange(100_000.0)
    tree = dict(zip("ab", expected.split(50_000), strict=True))
    dcp.save(tree, storage_writer=FileSystemWriter("step_1", single_file_per_rank=False))
    path = Path("step_1/.metadata")
    metadata = pickle.loads(path.read_bytes())
    _joined(metadata)
    path.write_bytes(pickle.dumps(metadata))
    same(load_file("step_1"), {"w": expected})
    for one in metadata.storage_data.values():
        file = Path("step_1", one.relative_path)
        with ingot.safe_open("step_1", "pt") as opened:
            copy = file.with_suffix(".copy")
            shutil.copy(file, copy)
            os.replace(copy, file)
            with pytest.raises(ingot.StorageError):
                opened.get_tensor("w")


def test_load_file_reads_every_dtype_of_a_distributed_checkpoint() -> None:
    dtypes = [getattr(torch, name) for name in CODES]
    bits = torch.randint(2, (4 * 64,), dtype=torch.uint8)
    tree = {str(dtype): bits.view(dtype).reshape(4, -1) for dtype in dtypes}
    tree |= {f"{dtype} scalar": bits.view(dtype)[3] for dtype in dtypes}
    tree |= {f"{dtype} empty": torch.empty(3, 0, dtype=dtype) for dtype in dtypes}
    folder = saved(tree)
    ingot.convert(folder, "out.safetensors")
    for path in (folder, "out.safetensors"):
        same(load_file(path), by_torch(folder))


def test_convert_and_load_file_run_nothing_of_the_metadata(payload: Payload) -> None:
    folder = edited(lambda metadata: setattr(metadata, "planner_data", {"x": payload}))
    assert load_file(folder).keys() == {"w", "other"}
    Path(folder, ".metadata").write_bytes(b"\x80\4" + pickle.dumps([Metadata({}), payload])[2:])
    with raises(ingot.ConversionError, "where a Metadata is expected"):
        load_file(folder)


@pytest.mark.filterwarnings("ignore")
def test_convert_of_changed_metadata_agrees_with_torch_or_fails(payload: Payload) -> None:
    folder = saved({"w": torch.arange(24.0).view(4, 6), "other": [torch.ones(3), 7]})
    expected = load_file(folder)
    path = Path(folder, ".metadata")
    seed, right = path.read_bytes(), 0
    for number in range(FILES):
        path.write_bytes(mutant([seed, pickle.dumps(payload)], random.Random(number)))
        tracemalloc.start()
        try:
            found = load_file(folder)
        except (ingot.SafetensorError, OSError):
            found = {}
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 << 20, number
        right += bool(found)
        # Names and tensors may be lost or changed, values may not.
        for tensor in found.values():
            assert any(torch.equal(tensor, one) for one in expected.values() if one.shape == tensor.shape)
    note("mutants of .metadata", FILES, 0)
    assert 0 < right < FILES
