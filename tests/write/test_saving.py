"""Values that `save` and `save_file` reject, and their defaults."""

from __future__ import annotations

import collections
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises

ARRAY = numpy.zeros(3, numpy.float32)
TENSOR = torch.zeros(3)


@pytest.fixture(params=["save", "save_file"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return one of the two ways to save. Afterwards, check that failed saves left no file."""

    def call(module: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if request.param == "save":
            return module.save(tensors, *args, **options)
        path = tmp_path / "t"
        before = path.exists()
        try:
            module.save_file(tensors, path, *args, **options)
        except Exception:
            assert path.exists() == before
            assert [file.name for file in tmp_path.iterdir()] == (["t"] if before else [])
            raise
        return path.read_bytes()

    return call


@pytest.mark.parametrize("value", ["text", 3, None, [1.0], TENSOR, b"x"])
def test_save_rejects_values_that_are_no_arrays(save: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="`key`"):
        save(ingot.numpy, {"key": value})


@pytest.mark.parametrize(
    "array",
    [
        numpy.array([None]),
        numpy.zeros(2, "i4,i4"),
        numpy.zeros(2, [("bfloat16", "f4")]),
        numpy.zeros(2, "M8[s]"),
        numpy.zeros(2, "m8[s]"),
        numpy.array(["text"]),
        numpy.array([b"text"]),
        numpy.zeros(2, "V4"),
        numpy.array(["text"], numpy.dtypes.StringDType()),
    ],
    ids=lambda array: str(array.dtype),
)
def test_save_rejects_arrays_without_numbers(save: Any, array: Any) -> None:
    with pytest.raises(TypeError, match="`key`") as caught:
        save(ingot.numpy, {"good": ARRAY, "key": array})
    assert isinstance(caught.value, ingot.DtypeError)
    assert caught.value.tensor == "key"


@pytest.mark.parametrize(
    "dtype", [complex, numpy.longdouble, ml_dtypes.int4, ml_dtypes.float6_e2m3fn, ml_dtypes.float8_e4m3]
)
def test_save_rejects_numpy_dtypes_that_files_lack(save: Any, dtype: Any) -> None:
    with raises(ingot.SaveError, "`key`", code="unsupported-dtype"):
        save(ingot.numpy, {"key": numpy.zeros(4, dtype)})


def test_save_rejects_a_masked_array(save: Any) -> None:
    with pytest.raises(TypeError, match=r"`key`.*mask"):
        save(ingot.numpy, {"key": numpy.ma.masked_array([1, 2], [True, False])})


def test_save_rejects_an_odd_number_of_nibbles(save: Any) -> None:
    with raises(ingot.SaveError, code="partial-byte"):
        save(ingot.numpy, {"key": numpy.zeros(3, ml_dtypes.float4_e2m1fn)})


def wrapper() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: TENSOR.to_sparse(), "to_dense"),
        (lambda: torch.zeros(2, 2).to_sparse_csr(), "to_dense"),
        (lambda: TENSOR.to_mkldnn(), "to_dense"),
        (lambda: TENSOR.to("meta"), "meta"),
        (lambda: torch.quantize_per_tensor(TENSOR, 0.1, 0, torch.quint8), "int_repr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "unbind"),
        (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter"),
        (wrapper, "FakeTensor"),
    ],
    ids=["coo", "csr", "mkldnn", "meta", "quantised", "nested", "lazy", "fake"],
)
def test_save_rejects_tensors_without_data(save: Any, build: Callable[[], torch.Tensor], word: str) -> None:
    with raises(ingot.SaveError, f"`key`.*{word}", tensor="key"):
        save(ingot.torch, {"good": TENSOR, "key": build()})


def test_save_rejects_torch_dtypes_that_files_lack(save: Any) -> None:
    with raises(ingot.SaveError, r"`key`.*complex128", code="unsupported-dtype"):
        save(ingot.torch, {"key": torch.zeros(2, dtype=torch.complex128)})


def test_save_checks_arguments_as_upstream_does(save: Any) -> None:
    with pytest.raises(ValueError, match="dict"):
        save(ingot.torch, [TENSOR])
    with pytest.raises(ValueError, match=r"`key`.*int"):
        save(ingot.torch, {"key": 3})
    with pytest.raises(ValueError, match=r"`key`.*ndarray"):
        save(ingot.torch, {"key": ARRAY})
    with pytest.raises(TypeError, match="dict"):
        save(ingot.numpy, [ARRAY])
    for module, value in ((ingot.numpy, ARRAY), (ingot.torch, TENSOR)):
        with pytest.raises(TypeError, match="int"):
            save(module, {1: value})
        for metadata in ({"a": 1}, {1: "a"}, [("a", "b")], "abc"):
            with pytest.raises(TypeError, match="metadata"):
                save(module, {"t": value}, metadata)
        with raises(ingot.SaveError, code="reserved-name"):
            save(module, {"__metadata__": value})
        with pytest.raises(ValueError, match="ud800"):
            save(module, {"\ud800": value})
        with pytest.raises(ValueError, match="ud800"):
            save(module, {"t": value}, {"a": "\ud800"})
        with raises(ingot.SaveError, r"`a`: '.ud800' at 1 of the value", code="invalid-unicode"):
            save(module, {"t": value}, {"a": "x\ud800"})


def test_save_takes_any_mapping_and_str(save: Any) -> None:
    class Name(str):
        pass

    data = save(ingot.numpy, collections.UserDict({Name("t"): ARRAY}), collections.UserDict({Name("k"): "v"}))
    assert data == ingot.numpy.save({"t": ARRAY}, {"k": "v"})
    assert save(ingot.torch, collections.OrderedDict(t=TENSOR), {"k": "v"}) == data


def test_save_leaves_the_callers_dicts_unchanged(save: Any) -> None:
    tensors, metadata = {"t": torch.zeros(2, 3).t()}, {"b": "1", "a": "2"}
    save(ingot.torch, tensors, metadata)
    assert list(tensors) == ["t"]
    assert not tensors["t"].is_contiguous()
    assert list(metadata) == ["b", "a"]


def shared() -> list[Any]:
    base = torch.arange(24.0).reshape(4, 6)
    flat = torch.arange(6.0)
    complex = flat.view(torch.complex64)
    return [
        pytest.param({"a": base, "b": base}, id="one tensor twice"),
        pytest.param({"a": base, "b": base.view(-1)}, id="another shape"),
        pytest.param({"a": base, "b": base[1:]}, id="a part"),
        pytest.param({"a": base, "b": base.t()}, id="transposed"),
        pytest.param({"a": base[:, ::2], "b": base[:, 2:4], "c": base[:, 1::2]}, id="columns"),
        pytest.param({"a": flat, "b": flat[2].expand(3, 3)}, id="broadcast"),
        pytest.param({"a": flat[1:3], "b": flat.unfold(0, 2, 1)}, id="windows"),
        pytest.param({"a": complex, "b": complex.conj()}, id="conjugate"),
        pytest.param({"b": torch.nn.Parameter(flat), "a": flat}, id="a parameter"),
    ]


@pytest.mark.parametrize("tensors", shared())
def test_save_names_tensors_that_share_memory(save: Any, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ingot.SharedMemoryError, match=r"^Some tensors share memory") as caught:
        save(ingot.torch, tensors)
    assert "`a`" in str(caught.value)
    assert "`b`" in str(caught.value)
    assert "clone()" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_save_names_every_view_of_a_shared_tensor(save: Any) -> None:
    whole = torch.arange(8.0)
    tensors = {"whole": whole, "early": whole[1:3], "late": whole[4:5], "other": torch.zeros(2)}
    with pytest.raises(ingot.SharedMemoryError) as caught:
        save(ingot.torch, tensors)
    assert all(f"`{name}`" in str(caught.value) for name in ("whole", "early", "late"))
    assert "other" not in str(caught.value)


def test_save_shortens_a_message_of_1000_shared_tensors(save: Any) -> None:
    whole = torch.arange(8.0)
    with pytest.raises(ingot.SharedMemoryError, match="and 995 more"):
        save(ingot.torch, {str(number): whole for number in range(1000)})


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"dtype": "F32", "shape": [-1], "data": b""}, "invalid-shape"),
        ({"dtype": "F32", "shape": [2], "data": b"1234"}, "size-mismatch"),
        ({"dtype": "F99", "shape": [1], "data": b"1234"}, "unknown-dtype"),
        ({"dtype": "U8", "shape": [2], "data": memoryview(b"1234")[::2]}, "not-contiguous"),
    ],
)
def test_serialize_names_a_buffer_that_does_not_fit(spec: dict[str, Any], code: str) -> None:
    with raises(ingot.SaveError, r"^tensor `bad`: ", code=code, tensor="bad"):
        ingot.serialize({"bad": spec})


def test_save_accepts_neighbours_in_one_storage(save: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for parts in (base.chunk(2), base.chunk(3, dim=1), (base[:, ::2], base[:, 1::2]), base.unbind(1)):
        tensors = {str(number): part for number, part in enumerate(parts)}
        loaded = ingot.torch.load(save(ingot.torch, tensors))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    empty = base[:, :0]
    assert len(ingot.torch.load(save(ingot.torch, {"a": base, "b": empty, "c": empty}))) == 3


def test_save_of_numpy_accepts_shared_memory(save: Any) -> None:
    loaded = ingot.numpy.load(save(ingot.numpy, {"a": ARRAY, "b": ARRAY}))
    assert (loaded["a"] == loaded["b"]).all()


def test_save_takes_parameters_and_state_dicts(save: Any) -> None:
    layer = torch.nn.Linear(3, 2)
    data = save(ingot.torch, layer.state_dict())
    assert data == save(ingot.torch, dict(layer.named_parameters()))
    assert torch.equal(ingot.torch.load(data)["weight"], layer.weight)


def test_save_takes_a_subclass_with_storage(save: Any) -> None:
    class Image(torch.Tensor):
        pass

    image = torch.ones(2, 3).as_subclass(Image)
    assert torch.equal(ingot.torch.load(save(ingot.torch, {"t": image}))["t"], torch.ones(2, 3))


def test_durable_falls_back_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    prepare = ingot._native.prepare

    def noted(*args: Any, durable: bool, **options: Any) -> Any:
        asked.append(durable)
        return prepare(*args, durable=False, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ingot._native, "prepare", noted)
    for variable in (None, "0", "1"):
        if variable is not None:
            monkeypatch.setenv("INGOT_DURABLE", variable)
        else:
            monkeypatch.delenv("INGOT_DURABLE", raising=False)
        for durable in (None, True, False):
            ingot.numpy.save_file({}, "t", durable=durable)
    assert asked == [True, True, False, False, True, False, True, True, False]


@pytest.mark.parametrize("found", ["false", "x", "00", " 0"])
def test_save_file_rejects_bad_variables(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_DURABLE", found)
    with raises(
        ingot.OptionError, f"INGOT_DURABLE '{found}' is invalid: expected 0 or 1", code="invalid-durable"
    ):
        ingot.numpy.save_file({}, tmp_path / "t")
    assert not list(tmp_path.iterdir())
    ingot.numpy.save_file({}, tmp_path / "t", durable=True)
    monkeypatch.setenv("INGOT_DURABLE", "")
    ingot.numpy.save_file({}, tmp_path / "t")


class TestOlderTorch:
    """Versions of torch that cannot export small floats by DLPack: these tensors are passed as bytes."""

    @pytest.fixture(autouse=True)
    def without_small_floats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrap = ingot._native.Wrap.dlpack(ingot.torch._tensors._from_dlpack, self.resolve)
        older = {"_crosses_by_dlpack": lambda dtype: dtype.itemsize > 1, "_export": None, "wrap": wrap}
        # Every module that has imported one of these names.
        for module in (ingot.torch._tensors, ingot.torch._files, ingot.torch._into):
            for name in older.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, older[name])

    @staticmethod
    def resolve(code: str) -> Any:
        # U8 itself is exported: the bytes of small floats arrive in this dtype.
        return None if code == "U8" else ingot.torch._tensors._resolve(code)

    @pytest.mark.parametrize("code", [code for code in ingot.torch.DTYPES if code != "U8"])
    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (3, 1, 2)])
    def test_older_torch_round_trips_every_dtype(
        self, tmp_path: Path, code: str, shape: tuple[int, ...]
    ) -> None:
        dtype = ingot.torch.DTYPES[code]
        if code == "F4" and not shape:
            shape = (1,)
        count = torch.zeros(shape).numel() * dtype.itemsize
        raw = (torch.arange(count) % 2).to(torch.uint8)
        tensor = raw.view(dtype).reshape(shape).swapaxes(0, -1) if shape else raw.view(dtype).reshape(())
        ingot.torch.save_file({"t": tensor}, tmp_path / "t")
        loaded = ingot.torch.load_file(tmp_path / "t")["t"]
        assert loaded.dtype == dtype
        assert loaded.shape == tensor.shape

        def flat(tensor: torch.Tensor) -> list[int]:
            parts = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor
            return parts.contiguous().reshape(-1).view(torch.uint8).tolist()

        assert flat(loaded) == flat(tensor)


@pytest.mark.parametrize("suffix", ["safetensors", "bt"])
def test_save_rejects_a_header_that_is_too_large(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(b"old")
    # The metadata alone would fit, and so would the names.
    metadata = {"k": "x" * 60_000_000}
    arrays = {f"{number}{'n' * 10_000_000}": numpy.zeros(1, numpy.uint8) for number in range(5)}
    for write in (
        lambda: ingot.numpy.save_file(arrays, path, metadata),
        lambda: ingot.numpy.save(arrays, metadata, format="bintensors" if suffix == "bt" else "safetensors"),
        lambda: ingot.Writer(path, arrays, metadata=metadata, overwrite=True),
    ):
        with raises(ingot.SaveError, code="header-too-large", expected=100_000_000) as caught:
            write()
        assert 110_000_000 < caught.value.found < 110_001_000
        assert f"at most 100000000 bytes, found {caught.value.found}" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


class Mine(Exception):
    """The error of a caller's code."""


def saved_by(way: str, arrays: dict[str, Any], path: Path) -> None:
    save = ingot.numpy.save_file
    if way == "save":
        ingot.numpy.save(arrays)
    elif way == "stream":
        save(arrays, io.BytesIO())
    elif way == "stream of digests":
        save(arrays, io.BytesIO(), checksums=True)
    elif way == "in place":
        save(arrays, path, atomic=False)
    elif way == "background":
        save(arrays, path, background=True, write_options={"snapshot": False}).result()
    elif way == "digests":
        save(arrays, path, checksums=True)
    elif way == "save_file":
        save(arrays, path)
    else:
        room = {"write_options": {"reserve_header": 10_000}} if way == "append" else {"specs": arrays}
        with ingot.Writer(path, **room, overwrite=True) as writer:
            for name, array in arrays.items():
                writer.write(name, array)


@pytest.mark.parametrize("good", [0, 1, 5])
@pytest.mark.parametrize(
    "way",
    [
        "save_file",
        "in place",
        "background",
        "digests",
        "save",
        "stream",
        "stream of digests",
        "Writer",
        "append",
    ],
)
def test_save_passes_on_the_error_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int, way: str
) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"old")
    # ingot fetches these arrays by calls into Python, about 4 MiB at a time.
    arrays = {"a": numpy.ones(8 << 20, ">f4"), "b": numpy.ones(3, ">f4")}
    fault, calls, elements = Mine("half-way"), 0, ingot.numpy._elements

    def failing(*which: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > good:
            raise fault
        return elements(*which)

    monkeypatch.setattr(ingot.numpy, "_elements", failing)
    with pytest.raises(Mine) as caught:
        saved_by(way, arrays, path)
    assert caught.value is fault
    assert calls == good + 1
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["t"]
