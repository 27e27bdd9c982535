"""`ingot.compat`: handles, prefetch, buffers and the functions of torch and NumPy act as the wheel's do."""

from __future__ import annotations

import ctypes
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from modules import REAL, RealError
from torch import nn

import ingot
import ingot.compat
import ingot.torch


def test_safe_open_can_be_closed_before_its_slices(compat: SimpleNamespace, path: Path) -> None:
    ours = compat.top.safe_open(path, "pt")
    ours.metadata().pop("format")
    assert ours.metadata() == {"format": "pt"}
    part = ours.get_slice("b")
    ours.__exit__(None, None, None)
    ours.__exit__(None, None, None)
    with ours as again:
        assert again is ours
    assert part[0].tolist() == [0, 1, 2, 3]


def test_safe_open_can_be_kept_shared_and_sent(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt", backend="pread")
    assert file in {file}
    part = file.get_slice("b")
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda row: part[row % 3].tolist(), range(300)))
    assert rows == [part[row % 3].tolist() for row in range(300)]
    again = pickle.loads(pickle.dumps(file))
    assert type(again) is compat.top.safe_open
    assert again is not file
    assert again.backend == "pread"
    file.__exit__(None, None, None)
    assert again.get_tensor("a").tolist() == [0, 1, 2]
    with pytest.raises(RealError, match="closed"):
        pickle.dumps(file)


def test_safe_open_has_metadata_of_a_tensor(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    meta = file.get_tensor_meta("b")
    assert (meta.dtype, meta.shape, meta.data_offsets) == ("F32", [3, 4], (24, 72))
    assert repr(meta) == 'TensorMeta { dtype: "F32", shape: [3, 4], data_offsets: (24, 72) }'
    with pytest.raises(RealError, match=r"^File does not contain tensor nope"):
        file.get_tensor_meta("nope")


def test_safe_open_reads_its_open_file(compat: SimpleNamespace, path: Path, tmp_path: Path) -> None:
    with path.open("rb") as opened:
        opened.read(3)
        # Another file gets the name. The handle still reads the opened one.
        ingot.torch.save_file({"other": torch.ones(1)}, tmp_path / "other")
        (tmp_path / "other").replace(path)
        file = compat.top._safe_open_handle(opened, "pt")
        assert opened.tell() == 3
    assert file.keys() == ["a", "b", "s"]
    assert file.get_tensor("a").tolist() == [0, 1, 2]
    assert file.get_slice("b")[1].tolist() == [4, 5, 6, 7]
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(file)
    with file:
        pass
    with pytest.raises(RealError, match=r"^File is closed"):
        file.keys()


def test_safe_open_rejects_an_empty_file(compat: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as opened, pytest.raises(RealError, match="header too small"):
        compat.top._safe_open_handle(opened, "np")


def test_prefetch_returns_each_tensor_once(compat: SimpleNamespace, path: Path) -> None:
    with compat.top.safe_open(path, "pt") as file, file.prefetch() as loader:
        assert loader.names() == file.offset_keys()
        assert len(loader) == 3
        assert loader.take("b").tolist() == torch.arange(12.0).reshape(3, 4).tolist()
        rest = dict(loader)
        assert {name: tensor.tolist() for name, tensor in rest.items()} == {"a": [0, 1, 2], "s": 1.0}
        assert list(loader) == []
        with pytest.raises(RealError, match="taken before"):
            loader.take("a")
        with pytest.raises(RealError, match=r"^tensor `nope` is not in the plan"):
            loader.take("nope")


def test_prefetch_follows_a_plan_and_outlives_its_handle(compat: SimpleNamespace, path: Path) -> None:
    with compat.top.safe_open(path, "np") as file:
        loader = file.prefetch({"b": slice(1, 3), "a": None}, device="cpu", threads=2)
    assert loader.names() == ["a", "b"]
    assert loader.take("b").tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    name, tensor = next(iter(loader))
    assert (name, tensor.tolist()) == ("a", [0, 1, 2])
    loader.close()
    loader.close()
    with pytest.raises(RealError, match="closed"):
        loader.take("nope")


# Tensors `b` of 3 rows and `s` of none.
REFUSED: list[Any] = [
    {"nope": None},
    {"b": 3},
    {3: None},
    {},
    {"s": slice(0, 1)},
    {"b": slice(0, 4)},
    {"b": slice(4, None)},
    {"b": slice(None, -4)},
    {"b": slice(-4, None)},
    {"b": slice("a", 2)},
    {"b": slice(1.0, 2)},
    {"b": slice(None, 2**70)},
    {"b": slice(0, 2, 0)},
    {"b": slice(0, 2, 2)},
    {"b": slice(0, 2, -1)},
    {"b": slice(0, 2, "a")},
]
TAKEN: list[Any] = [
    {"b": slice(2, 1)},
    {"b": slice(3, None)},
    {"b": slice(-3, 3)},
    {"b": slice(None, -3)},
    {"b": slice(True, None)},
    {"b": slice(0, 2, True)},
    {"s": None, "b": slice(None)},
    None,
]


@pytest.mark.parametrize("plan", REFUSED, ids=str)
def test_prefetch_rejects_a_plan_as_0_9_does(compat: SimpleNamespace, path: Path, plan: Any) -> None:
    with pytest.raises(RealError):
        compat.top.safe_open(path, "pt").prefetch(plan)


@pytest.mark.parametrize("plan", TAKEN, ids=str)
def test_prefetch_takes_a_plan_as_0_9_does(compat: SimpleNamespace, path: Path, plan: Any) -> None:
    file = compat.top.safe_open(path, "pt")
    whole = file.get_tensors()
    plan = dict.fromkeys(whole) if plan is None else plan
    with file.prefetch(plan) as loader:
        found = {name: tensor.tolist() for name, tensor in loader}
    expected = {name: whole[name] if rows is None else whole[name][rows] for name, rows in plan.items()}
    assert found == {name: tensor.tolist() for name, tensor in expected.items()}


def test_prefetch_raises_type_error_for_a_plan_that_is_no_dict(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    with pytest.raises(TypeError, match="'list' object is not an instance of 'dict'"):
        file.prefetch(["a"])
    with pytest.raises(OverflowError):
        file.prefetch(threads=-1)
    assert len(file.prefetch(threads=0)) == 3


def test_serialize_reads_a_tensor_by_its_address(compat: SimpleNamespace, tmp_path: Path) -> None:
    memory = ctypes.create_string_buffer(b"12345678", 8)
    arguments = {"dtype": "float32", "shape": (2,), "data_ptr": ctypes.addressof(memory), "data_len": 8}
    ours, theirs = compat.top.TensorSpec(**arguments), REAL.top.TensorSpec(**arguments)
    assert repr(ours) == repr(theirs)
    assert (ours.dtype, ours.shape, ours.data_ptr, ours.data_len) == (
        "F32",
        [2],
        arguments["data_ptr"],
        8,
    )
    wanted = REAL.top.serialize({"a": theirs}, {"k": "v"})
    assert compat.top.serialize({"a": ours}, {"k": "v"}) == wanted
    compat.top.serialize_file({"a": ours}, tmp_path / "t.bt", metadata={"k": "v"})
    assert (tmp_path / "t.bt").read_bytes() == wanted
    assert compat.top.deserialize(wanted) == [("a", {"dtype": "F32", "shape": [2], "data": b"12345678"})]
    packed = compat.top.TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 4], data_ptr=8, data_len=8)
    assert (packed.dtype, packed.shape) == ("F4", [2, 8])
    with pytest.raises(TypeError):
        pickle.dumps(ours)
    with pytest.raises(AttributeError):
        ours.dtype = "F16"


def test_serialize_rejects_an_address_of_nothing(compat: SimpleNamespace) -> None:
    spec = compat.top.TensorSpec(dtype="float32", shape=[2], data_ptr=0, data_len=8)
    with pytest.raises(RealError, match="its address is 0"):
        compat.top.serialize({"a": spec})
    empty = compat.top.TensorSpec(dtype="float32", shape=[0], data_ptr=0, data_len=0)
    assert compat.top.serialize({"a": empty}) == REAL.torch.save({"a": torch.ones(0)})
    with pytest.raises(OverflowError):
        compat.top.TensorSpec(dtype="float32", shape=[-2], data_ptr=0, data_len=8)


def test_serialize_takes_buffers_as_0_7_does(compat: SimpleNamespace) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    flat = compat.torch._flatten(tensors)
    assert flat["a"] == {"dtype": "float32", "shape": torch.Size([3]), "data": tensors["a"].numpy().tobytes()}
    assert compat.top.serialize(flat) == REAL.torch.save(tensors)


def test_serialize_takes_tensors_as_0_8_does(compat: SimpleNamespace) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16), "e": torch.ones(0)}
    keep: list[Any] = []
    specs = compat.torch._flatten_as_ptr(tensors, keep)
    assert len(keep) == 3
    assert compat.top.serialize(specs) == REAL.torch.save(tensors)
    arrays = {"a": numpy.arange(3.0), "f": numpy.asfortranarray(numpy.ones((2, 3)))}
    specs = compat.numpy._flatten(arrays, keep)
    assert compat.top.serialize(specs) == ingot.numpy.save(arrays)
    for name, array in arrays.items():
        assert compat.numpy._tobytes(array) == numpy.ascontiguousarray(array).tobytes(), name
    with pytest.raises(ValueError, match="non contiguous tensor: `t`"):
        compat.torch._flatten_as_ptr({"t": torch.ones(2, 3).t()}, keep)


def test_save_file_writes_the_files_of_the_wheel(compat: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.int8)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for texts in (None, {"format": "pt"}):
        wanted = REAL.torch.save(tensors, texts)
        assert compat.torch.save(tensors, texts) == wanted
        assert compat.numpy.save(arrays, texts) == wanted
        # ingot itself would write this name as bintensors. Upstream ignores the extension.
        compat.torch.save_file(tensors, tmp_path / "t.bt", metadata=texts)
        assert (tmp_path / "t.bt").read_bytes() == wanted
        compat.numpy.save_file(arrays, tmp_path / "n.bt", metadata=texts)
        assert (tmp_path / "n.bt").read_bytes() == wanted
    assert compat.torch.load(wanted).keys() == REAL.torch.load(wanted).keys()
    assert compat.torch.save({}) == REAL.torch.save({})


def test_dtypes_table_can_be_changed(compat: SimpleNamespace) -> None:
    data = ingot.torch.save({"t": torch.ones(4, dtype=torch.float8_e4m3fn)})
    assert compat.torch.load(data)["t"].dtype == torch.float8_e4m3fn
    compat.torch._TYPES["F8_E4M3"] = torch.uint8
    assert compat.torch._getdtype("F8_E4M3") == torch.uint8
    assert compat.torch.load(data)["t"].dtype == torch.uint8
    array = ingot.numpy.save({"t": numpy.ones(2, numpy.int16)})
    compat.numpy._TYPES["I16"] = numpy.uint16
    assert compat.numpy.load(array)["t"].dtype == numpy.uint16
    with pytest.raises(KeyError):
        compat.torch._getdtype("F33")


@pytest.mark.parametrize("code", sorted(ingot.torch.DTYPES))
def test_save_and_load_handle_every_dtype(compat: SimpleNamespace, code: str, tmp_path: Path) -> None:
    dtype = ingot.torch.DTYPES[code]
    tensor = torch.tensor([1, 0] * 4, dtype=torch.uint8).view(dtype)
    compat.torch.save_file({"t": tensor}, tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    loaded = [
        compat.torch.load_file(tmp_path / "t"),
        compat.torch.load_file(tmp_path / "t", backend="pread"),
        compat.torch.load(data),
        compat.torch._view2torch(compat.top.deserialize(data)),
        {"t": compat.top.safe_open(tmp_path / "t", "pt").get_slice("t")[:]},
    ]
    for tensors in loaded:
        assert tensors["t"].dtype == dtype
        assert tensors["t"].shape == tensor.shape
        assert tensors["t"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    keep: list[Any] = []
    assert compat.top.serialize(compat.torch._flatten_as_ptr({"t": tensor}, keep)) == data


def test_save_model_and_load_model_equal_the_wheels(compat: SimpleNamespace, tmp_path: Path) -> None:
    model = nn.Module()
    model.a = model.c = nn.Linear(3, 3)
    model.b = nn.Linear(2, 2)
    texts = {"format": "pt"}
    compat.torch.save_model(model, tmp_path / "ours", metadata=texts)
    assert texts == {"format": "pt"}
    REAL.torch.save_model(model, str(tmp_path / "theirs"), metadata=dict(texts))
    ours, theirs = (REAL.top.safe_open(tmp_path / name, "pt") for name in ("ours", "theirs"))
    assert ours.metadata() == theirs.metadata()
    assert ours.keys() == theirs.keys()
    for load in (compat.torch.load_model, REAL.torch.load_model):
        assert load(model, tmp_path / "ours") == (set(), [])
        assert load(nn.Linear(2, 2), tmp_path / "ours", strict=False)[0] == {"weight", "bias"}
    with warnings.catch_warnings():
        # Upstream does not warn about another dtype.
        warnings.simplefilter("error")
        compat.torch.load_model(model.half(), tmp_path / "ours")


def test_private_tobytes_equals_the_wheels(compat: SimpleNamespace) -> None:
    for tensor in (
        torch.arange(3.0),
        torch.tensor(1.0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(0, 3),
    ):
        array, owner = compat.torch._to_ndarray(tensor)
        assert (
            array.tobytes()
            == compat.torch._tobytes(tensor, "t")
            == REAL.torch._to_ndarray(tensor)[0].tobytes()
        )
        assert isinstance(owner, torch.Tensor)
    with pytest.raises(ValueError, match="sparse tensor: `t`"):
        compat.torch._tobytes(torch.eye(2).to_sparse(), "t")


def test_private_numpy_functions_equal_the_wheels(compat: SimpleNamespace) -> None:
    assert (
        compat.numpy._is_little_endian(numpy.ones(1)) is REAL.numpy._is_little_endian(numpy.ones(1)) is True
    )
    assert compat.numpy._is_little_endian(numpy.ones(1, ">f4")) is False
    views = compat.top.deserialize(ingot.torch.save({"t": torch.ones(2, dtype=torch.bfloat16)}))
    assert compat.numpy._view2np(views)["t"].astype(float).tolist() == [1, 1]
    assert compat.numpy._getdtype("F32") == REAL.numpy._getdtype("F32")
