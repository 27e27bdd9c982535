"""Conversion of PyTorch's checkpoints."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
from ingot import _convert
from ingot.torch import load_file
from support.errors import raises

from .conftest import Payload

WEIGHT = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def saved(state: object, path: str, *, legacy: bool = False) -> str:
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return path


def repacked(path: str, out: str, method: int = zipfile.ZIP_STORED, **changed: bytes) -> str:
    """Write the archive again with changed members, or compressed, and return its path."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            data = changed.get(info.filename.rpartition("/")[2].replace(".", "_"), old.read(info))
            new.writestr(info.filename, data)
    return out


def test_convert_copies_torch_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert.values, "PIECE_NBYTES", 64)
    monkeypatch.setattr(_convert.write, "PIECE_NBYTES", 100)
    torch.manual_seed(0)
    state = {
        "flat": torch.randn(101),
        "rows": torch.randn(9, 5),
        "wide": torch.randn(2, 3, 50),
        "ones": torch.randn(1, 1, 60),
        "half": torch.randn(7, 33).half(),
        "scalar": torch.tensor(7),
        "turned": torch.randn(40, 3).t(),
        "part": torch.randn(50, 4)[7:30],
    }
    ingot.convert(saved(state, "model.bin"), "out.safetensors")
    found = load_file("out.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_convert_names_a_file_truncated_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved({"tensor": torch.arange(1000.0)}, "model.bin")
    real = _convert.write.Task.write_file

    def shortened(*arguments: Any) -> None:
        with open(path, "r+b") as file:
            file.truncate(2000)
        real(*arguments)

    monkeypatch.setattr(_convert.write.Task, "write_file", shortened)
    with pytest.raises(ingot.ConversionError, match=r"model\.bin.*`tensor`.*truncated"):
        ingot.convert(path, "out.safetensors")
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_convert_resolves_conjugates_and_negatives(legacy: bool) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    state = {"values": values, "conjugate": values.conj(), "negative": torch._neg_view(torch.ones(2, 2))}
    path = saved(state, "model.bin", legacy=legacy)
    assert not ingot.convert(path, "out.safetensors").shared
    found = load_file("out.safetensors")
    assert found.keys() == state.keys()
    assert all(
        torch.equal(found[name], tensor.resolve_conj().resolve_neg()) for name, tensor in state.items()
    )


def test_convert_writes_a_shared_tensor_once() -> None:
    embedding = torch.nn.Embedding(5, 3)
    head = torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"head": head, "embedding": embedding})
    torch.save(model.state_dict(), "model.bin")
    report = ingot.convert("model.bin", "out.safetensors")
    ingot.torch.save_file(model.state_dict(), "expected.safetensors", {"format": "pt"}, shared="alias")
    assert Path("out.safetensors").read_bytes() == Path("expected.safetensors").read_bytes()
    assert report.shared == {"head.weight": "embedding.weight"}
    ingot.torch.load_model(model, "out.safetensors")


def test_convert_names_nested_tensors_by_path() -> None:
    tree = {
        "state_dict": {"layer": {"weight": WEIGHT}},
        "optimizer": {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "history": [torch.ones(1), {"best": torch.zeros(1)}],
        "epoch": 3,
        "note": "x" * 500,
    }
    report = ingot.convert(saved(tree, "model.ckpt"), "out.safetensors")
    assert set(load_file("out.safetensors")) == {
        "state_dict.layer.weight",
        "optimizer.state.0.momentum",
        "history.0",
        "history.1.best",
    }
    others = {one.name: (one.kind, one.value) for one in report.left_out}
    assert others["epoch"] == ("int", "3")
    assert others["optimizer.param_groups"] == ("list", "1 items")
    assert len(others["note"][1]) <= 80


def test_convert_root_selects_a_part() -> None:
    path = saved({"state_dict": {"weight": WEIGHT}, "optimizer": {"weight": WEIGHT}}, "model.ckpt")
    report = ingot.convert(path, "out.safetensors", root="state_dict")
    assert set(load_file("out.safetensors")) == {"weight"}
    assert report.dropped == ("optimizer.weight",)
    with raises(ingot.ConversionError, "no tensor is below `model`", code="no-tensors"):
        ingot.convert(path, "other.safetensors", root="model")


def test_convert_rejects_two_tensors_of_one_flat_name() -> None:
    path = saved({"a": {"b": WEIGHT}, "a.b": torch.ones(1)}, "model.pt")
    with raises(ingot.ConversionError, r"model.pt: tensor `a.b`: two tensors", code="duplicate-tensor"):
        ingot.convert(path, "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_convert_names_a_lone_tensor() -> None:
    ingot.convert(saved(WEIGHT, "model.pt"), "out.safetensors")
    assert torch.equal(load_file("out.safetensors")["tensor"], WEIGHT)


@pytest.mark.parametrize("how", ["archive", "legacy", "plain"])
def test_convert_rejects_a_pickle_with_a_payload(how: str, payload: Payload) -> None:
    state = {"weight": WEIGHT, "more": payload}
    if how == "plain":
        Path("model.bin").write_bytes(pickle.dumps({"more": payload}))
    else:
        saved(state, "model.bin", legacy=how == "legacy")
    with raises(ingot.ConversionError, r"model.bin: .*not run.*mkdir", code="unsafe-pickle"):
        ingot.convert("model.bin", "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_convert_rejects_a_whole_module() -> None:
    saved(torch.nn.Linear(2, 2), "model.pt")
    with pytest.raises(ingot.ConversionError, match=r"refers to more than tensors.*Linear"):
        ingot.convert("model.pt", "out.safetensors")


class Scripted(torch.nn.Module):
    """A module with parameters, a buffer, an attribute, and a constant in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3))
        self.register_buffer("mask", torch.arange(4))
        self.state = torch.full((2,), 7.0)
        self.sizes, self.word = [1, 2], "x"

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(data) + torch.tensor([0.5, 0.25, 0.125]).view(3, 1)
        return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_traced", [False, True])
def test_convert_reads_the_tensors_of_torchscript_without_its_program(is_traced: bool) -> None:
    model = Scripted().eval()
    data = torch.ones(1, 2, 9)
    program = torch.jit.trace(model, data) if is_traced else torch.jit.script(model)
    torch.jit.save(program, "model.pt", _extra_files={"notes.txt": "hello"})  # type: ignore[no-untyped-call]
    report = ingot.convert("model.pt", "out.safetensors")
    found = load_file("out.safetensors")
    constants = {name for name in found if name.startswith("constants.")}
    # Tracing keeps the values of attributes as constants.
    expected = program.state_dict() if is_traced else {**program.state_dict(), "state": model.state}
    assert found.keys() - constants == expected.keys()
    assert not is_traced or torch.equal(found["constants.0"].view(-1), torch.tensor([0.5, 0.25, 0.125]))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert {(one.name, one.kind) for one in report.left_out} == {
        ("code", "program"),
        ("extra/notes.txt", "file"),
    }


def test_convert_names_a_storage_that_is_too_short() -> None:
    path = repacked(saved({"weight": WEIGHT}, "model.bin"), "short.bin", **{"0": bytes(8)})
    with raises(ingot.ConversionError, r"tensor `weight`: .*expected 96 bytes, found 8", code="truncated"):
        ingot.convert(path, "out.safetensors")


def test_convert_names_a_storage_that_is_not_listed() -> None:
    """torch reads only the storages in the list at the end. All others are uninitialised memory."""
    torch.save({"weight": WEIGHT}, "old.pt", _use_new_zipfile_serialization=False)
    data = Path("old.pt").read_bytes()
    at = data.rindex(b"\x80\x02]q")
    for keys in ([], ["other"]):
        Path("old.pt").write_bytes(data[:at] + pickle.dumps(keys, 2))
        with pytest.raises(ingot.ConversionError, match=r"old.pt: .*storage"):
            ingot.convert("old.pt", "out.safetensors")


def test_convert_limits_the_expansion_of_strides() -> None:
    path = saved({"weight": torch.zeros(1).expand(1 << 40)}, "model.bin")
    with raises(ingot.ConversionError, r"4,398,046,511,104 bytes.*limit is 1,073,741,824", code="too-large"):
        ingot.convert(path, "out.safetensors")
    with pytest.raises(ingot.ConversionError, match="limit is 95 "):
        ingot.convert(saved(WEIGHT, "small.pt"), "out.safetensors", max_nbytes=95)
    ingot.convert("small.pt", "out.safetensors", max_nbytes=96)


def test_convert_limits_nested_lists() -> None:
    wide: list[Any] = [WEIGHT]
    for _ in range(40):
        wide = [wide, wide]
    with raises(ingot.ConversionError, r"wide.pt: .* bytes of objects beside", code="too-large"):
        ingot.convert(saved(wide, "wide.pt"), "out.safetensors")
    deep: list[Any] = [WEIGHT]
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ingot.ConversionError, match="more than 64 levels"):
        ingot.convert(saved(deep, "deep.pt"), "out.safetensors")


def test_convert_rejects_a_dtype_that_files_lack() -> None:
    path = saved({"weight": WEIGHT, "wide": torch.ones(2, dtype=torch.complex128)}, "model.pt")
    with pytest.raises(ingot.ConversionError, match=r"tensor `wide`: .*complex128") as caught:
        ingot.convert(path, "out.safetensors")
    assert caught.value.code == "unsupported-dtype"
    assert caught.value.tensor == "wide"
    report = ingot.convert(path, "out.safetensors", drop="wide")
    assert report.dropped == ("wide",)


def test_convert_reads_torch_files_without_torch() -> None:
    saved({"weight": WEIGHT}, "model.pt")
    program = (
        "import sys; sys.modules['torch'] = None; import ingot; ingot.convert('model.pt', 'out.safetensors')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.equal(load_file("out.safetensors")["weight"], WEIGHT)


def sharded(**weight_map: object) -> str:
    saved({"a": WEIGHT}, "pytorch_model-00001-of-00002.bin")
    saved({"b": torch.ones(2)}, "pytorch_model-00002-of-00002.bin")
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = {"metadata": {"total_size": 104}, "weight_map": names | weight_map}
    Path("pytorch_model.bin.index.json").write_text(json.dumps(index))
    return "pytorch_model.bin.index.json"


@pytest.mark.parametrize("path", ["pytorch_model.bin.index.json", "."])
def test_convert_merges_a_sharded_checkpoint(path: str) -> None:
    sharded()
    report = ingot.convert(path, "out.safetensors")
    assert report.source_format == "sharded"
    assert set(load_file("out.safetensors")) == {"a", "b"}


@pytest.mark.parametrize(
    "location",
    [
        "../evil.bin",
        "/etc/passwd",
        "a/../../evil.bin",
        "C:evil.bin",
        "..\\evil.bin",
        "a\0b",
        "",
        "./x.bin",
        "~/x",
    ],
)
def test_convert_rejects_an_index_to_outside_files(location: str) -> None:
    with raises(ingot.ConversionError, r"index.json: `c` names the file", code="outside"):
        ingot.convert(sharded(c=location), "out.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "code"),
    [
        ({"c": "pytorch_model-00001-of-00002.bin"}, "index-mismatch"),
        ({"b": "pytorch_model-00001-of-00002.bin"}, "index-mismatch"),
        ({"c": "gone.bin"}, "missing-file"),
        ({"c": 5}, "unreadable"),
    ],
)
def test_convert_rejects_an_index_that_does_not_fit(weight_map: dict[str, object], code: str) -> None:
    if weight_map.get("b"):
        torch.save({"x": WEIGHT}, "pytorch_model-00002-of-00002.bin")
    with raises(ingot.ConversionError, code=code):
        ingot.convert(sharded(**weight_map), "out.safetensors")


def test_convert_names_a_tar() -> None:
    with tarfile.open("model.tar", "w") as archive:
        info = tarfile.TarInfo("storages")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"1234"))
    with pytest.raises(ingot.ConversionError, match="a tar archive: unpack it first"):
        ingot.convert("model.tar", "out.safetensors")
