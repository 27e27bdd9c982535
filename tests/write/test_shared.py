"""Torch tensors that share memory: stored once, and loaded as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ingot
import ingot.torch
from ingot._native import SHARED_KEY


def data_nbytes(path: Path) -> int:
    """The size of the file without its header."""
    head = path.read_bytes()[:8]
    return path.stat().st_size - 8 - int.from_bytes(head, "little")


def names(path: Path) -> list[str]:
    with ingot.safe_open(path, "pt") as file:
        return file.keys()


def metadata(path: Path) -> dict[str, str] | None:
    with ingot.safe_open(path, "pt") as file:
        return file.metadata()


def check_same(loaded: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    assert set(loaded) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].stride() == tensor.stride()


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(100, 100)
        self.b = self.a


class Rows(nn.Module):
    """A module whose parameters are parts of a storage. No parameter covers the whole storage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.zeros(1000, 4)[1:2])


# --- save_file and load_file ---


@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
def test_save_file_alias_stores_a_repeated_layer_once(path: Path, format: Any) -> None:
    state = Twice().state_dict()
    ingot.torch.save_file(state, path, {"step": "1"}, shared="alias", format=format)
    assert names(path) == ["a.bias", "a.weight"]
    with ingot.safe_open(path, "pt") as file:
        assert file.get_slice("a.weight").get_shape() == [100, 100]
        assert file.metadata()["step"] == "1"  # type: ignore[index]
    # The file has the weight and the bias once, and a header of a few hundred bytes.
    assert 40_400 <= path.stat().st_size < 41_000
    loaded = ingot.torch.load_file(path)
    check_same(loaded, state)
    loaded["b.weight"].fill_(7)
    assert (loaded["a.weight"] == 7).all()


def test_save_file_stores_only_the_row_of_a_big_tensor(path: Path) -> None:
    big = torch.randn(100_000, 4)
    for shared in ("error", "copy", "alias"):
        ingot.torch.save_file({"row": big[1:2]}, path, shared=shared)
        assert data_nbytes(path) == 16
        check_same(ingot.torch.load_file(path), {"row": big[1:2]})


def test_load_file_restores_views_on_shared_memory(path: Path) -> None:
    big = torch.arange(40.0).reshape(10, 4)
    tensors = {
        "big": big,
        "column": big[:, 1],
        "flat": big.view(-1),
        "other": torch.ones(3),
        "row": big[1:2],
        "same row": big[1:2],
        "transposed": big.t(),
    }
    ingot.torch.save_file(tensors, path, shared="alias")
    assert names(path) == ["big", "other"]
    for loaded in (ingot.torch.load_file(path), ingot.torch.load(path.read_bytes())):
        check_same(loaded, tensors)
        loaded["row"].fill_(-1)
        assert loaded["big"][1].tolist() == loaded["same row"][0].tolist() == [-1] * 4
        assert loaded["column"][1] == loaded["transposed"][0, 1] == loaded["flat"][4] == -1


def test_save_file_alias_stores_a_transposed_tensor_in_c_order(path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    ingot.torch.save_file({"a": turned, "b": turned}, path, shared="alias")
    loaded = ingot.torch.load_file(path)
    assert torch.equal(loaded["a"], turned)
    assert torch.equal(loaded["b"], turned)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


@pytest.mark.parametrize("code", sorted(ingot.torch.DTYPES))
def test_save_file_alias_stores_every_dtype(path: Path, code: str) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(ingot.torch.DTYPES[code]) if code != "BOOL" else None
    if tensor is None:
        tensor = torch.tensor([True, False])
    ingot.torch.save_file({"a": tensor, "b": tensor}, path, shared="alias")
    loaded = ingot.torch.load_file(path)
    assert loaded["b"].dtype == tensor.dtype
    assert loaded["b"].data_ptr() == loaded["a"].data_ptr()
    assert loaded["b"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_load_file_drop_returns_the_stored_tensors(path: Path) -> None:
    ingot.torch.save_file(Twice().state_dict(), path, shared="alias")
    assert set(ingot.torch.load_file(path, shared="drop")) == {"a.weight", "a.bias"}
    assert set(ingot.torch.load(path.read_bytes(), shared="drop")) == {"a.weight", "a.bias"}


def test_save_file_copy_stores_each_tensor(path: Path) -> None:
    state = Twice().state_dict()
    ingot.torch.save_file(state, path, shared="copy")
    assert data_nbytes(path) == 80_800
    loaded = ingot.torch.load_file(path)
    check_same(loaded, state)
    assert loaded["a.weight"].data_ptr() != loaded["b.weight"].data_ptr()


def test_save_file_error_names_two_tensors_and_the_remedy(path: Path) -> None:
    with pytest.raises(ingot.SharedMemoryError, match=r"^Some tensors share memory") as caught:
        ingot.torch.save_file(Twice().state_dict(), path)
    assert "`a." in str(caught.value)
    assert "`b." in str(caught.value)
    assert 'shared="alias"' in str(caught.value)
    assert not path.exists()


def test_save_file_alias_rejects_parts_of_no_stored_tensor(path: Path) -> None:
    big = torch.zeros(10, 4)
    with pytest.raises(ingot.SharedMemoryError, match=r'`a`, `b` — none holds all of it.*shared="copy"'):
        ingot.torch.save_file({"a": big[:3], "b": big[2:5]}, path, shared="alias")
    # The tensors share memory, but one cannot be described as a part of the other.
    with pytest.raises(ingot.SharedMemoryError, match="`a`, `b`"):
        ingot.torch.save_file({"a": big, "b": big.view(torch.int32)}, path, shared="alias")
    with pytest.raises(ingot.SharedMemoryError, match="`a`, `b`"):
        ingot.torch.save_file({"a": big[0], "b": big[0].expand(3, 4)}, path, shared="alias")
    assert not path.exists()


def test_save_file_alias_refuses_a_tensor_between_two_elements_of_another(path: Path) -> None:
    memory = bytearray(12)
    tensors = {
        "a": torch.frombuffer(memory, dtype=torch.float32),
        "b": torch.frombuffer(memory, dtype=torch.float32, count=1, offset=2),
    }
    with pytest.raises(ingot.SharedMemoryError, match="`a`, `b`"):
        ingot.torch.save_file(tensors, path, shared="alias")


def test_save_file_alias_distinguishes_a_square_tensor_from_its_transpose(path: Path) -> None:
    square = torch.arange(4.0).reshape(2, 2)
    ingot.torch.save_file({"a": square, "b": square.t()}, path, shared="alias")
    check_same(ingot.torch.load_file(path), {"a": square, "b": square.t()})


def test_save_file_alias_stores_the_whole_of_parts_that_begin_with_it(path: Path) -> None:
    big = torch.arange(40.0).reshape(10, 4)
    ingot.torch.save_file({"a": big[:3], "b": big}, path, shared="alias")
    assert names(path) == ["b"]
    check_same(ingot.torch.load_file(path), {"a": big[:3], "b": big})


def test_save_file_alias_stores_disjoint_parts(path: Path) -> None:
    big = torch.arange(12.0).reshape(2, 6)
    parts = dict(zip("abc", big.chunk(3, dim=1), strict=True))
    ingot.torch.save_file(parts, path, shared="alias")
    assert data_nbytes(path) == 48
    loaded = ingot.torch.load_file(path)
    assert all(torch.equal(loaded[name], part) for name, part in parts.items())


def test_save_alias_without_sharing_changes_nothing(path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    for texts in (None, {}, {"step": "1"}):
        assert ingot.torch.save(tensors, texts, shared="alias") == ingot.torch.save(tensors, texts)


def test_save_file_drops_an_alias_record_of_other_tensors(path: Path) -> None:
    ingot.torch.save_file(Twice().state_dict(), path, shared="alias")
    tensors = {"a": torch.zeros(1)}
    ingot.torch.save_file(tensors, path, metadata(path), shared="alias")
    assert SHARED_KEY not in (metadata(path) or {})
    assert set(ingot.torch.load_file(path)) == {"a"}


def test_shared_lists_choices_for_an_unknown_one(path: Path) -> None:
    path.write_bytes(ingot.torch.save({}))
    calls: list[tuple[Callable[..., Any], Any, str]] = [
        (ingot.torch.save, {}, "error, copy, alias"),
        (lambda data, shared: ingot.torch.save_file(data, path, shared=shared), {}, "error, copy, alias"),
        (ingot.torch.load_file, path, "alias, drop"),
        (ingot.torch.load, path.read_bytes(), "alias, drop"),
    ]
    for call, first, choices in calls:
        with pytest.raises(ingot.OptionError, match=f"shared 'both' is unknown: expected one of {choices}"):
            call(first, shared="both")


# --- hostile records ---


def with_record(record: Any) -> bytes:
    text = record if isinstance(record, str) else json.dumps(record)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "c": torch.ones(1)}
    # A save drops a record in `metadata`, so that it is written here by hand.
    data = ingot.torch.save(tensors, {"place of it": ""})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {SHARED_KEY: text}
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + length :]


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[" * 100_000,
        [],
        {"b": "a"},
        {"b": {}},
        {"b": {"of": 1}},
        {"b": {"of": "a", "shape": [1]}},
        {"b": {"of": "a", "shape": [1], "stride": [1], "begin": -1}},
        {"b": {"of": "a", "shape": [1], "stride": [True], "begin": 0}},
        {"b": {"of": "a", "shape": [1, 1], "stride": [1], "begin": 0}},
        {"b": {"of": "a", "shape": [1], "stride": [1], "begin": 2**63}},
        {"b": {"of": "a", "shape": [2], "stride": [1], "begin": 5}},
        {"b": {"of": "a", "shape": [7], "stride": [0], "begin": 0}},
        {"b": {"of": "a", "shape": [2, 2], "stride": [5, 1], "begin": 0}},
        {"b": {"of": "a", "shape": [2**40, 2**40], "stride": [0, 0], "begin": 0}},
    ],
)
def test_load_rejects_a_broken_alias_record(record: Any) -> None:
    with pytest.raises(ingot.SafetensorError, match=r"metadata `ingot.shared`") as caught:
        ingot.torch.load(with_record(record))
    assert caught.value.code == "invalid-alias"
    assert set(ingot.torch.load(with_record(record), shared="drop")) == {"a", "c"}


def test_load_ignores_aliases_of_stored_and_missing_names() -> None:
    loaded = ingot.torch.load(with_record({"c": {"of": "a"}, "d": {"of": "gone"}, "e": {"of": "a"}}))
    assert set(loaded) == {"a", "c", "e"}
    assert loaded["c"].tolist() == [1.0]


# --- save_model and load_model ---


def test_save_model_keeps_the_first_name(path: Path) -> None:
    texts = {"format": "pt"}
    model = Twice()
    ingot.torch.save_model(model, path, texts)
    assert texts == {"format": "pt"}
    assert names(path) == ["a.bias", "a.weight"]
    assert metadata(path) == {"format": "pt", "b.weight": "a.weight", "b.bias": "a.bias"}
    assert data_nbytes(path) == 40_400
    other = Twice()
    assert ingot.torch.load_model(other, path) == (set(), [])
    assert torch.equal(other.b.weight, model.a.weight)


def test_save_model_rejects_a_part_of_a_storage_with_a_hint(path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no suitable name to keep.*`row`.*`\.clone\(\)`") as caught:
        ingot.torch.save_model(Rows(), path)
    assert isinstance(caught.value, ingot.SharedMemoryError)
    ingot.torch.save_file({"row": torch.ones(1, 4)}, path)
    model = Rows()
    assert ingot.torch.load_model(model, path) == (set(), [])
    assert model.row.tolist() == [[1.0] * 4]  # type: ignore[operator]


def test_load_model_strict_names_missing_and_unexpected_keys(path: Path) -> None:
    ingot.torch.save_file({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, path)
    with pytest.raises(RuntimeError) as caught:
        ingot.torch.load_model(nn.Linear(2, 2), path)
    assert str(caught.value).splitlines() == [
        "Error(s) in loading state_dict for Linear:",
        '    Missing key(s) in state_dict: "bias"',
        '    Unexpected key(s) in state_dict: "extra"',
    ]
    assert ingot.torch.load_model(nn.Linear(2, 2), path, strict=False) == ({"bias"}, ["extra"])


def test_save_model_keeps_the_names_of_shared_tensors_with_alias(path: Path) -> None:
    model = Twice()
    ingot.torch.save_model(model, path, shared="alias")
    loaded = ingot.torch.load_file(path)
    assert loaded.keys() == model.state_dict().keys()
    assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
    assert ingot.torch.load_model(Twice(), path) == (set(), [])
    with pytest.raises(ingot.SharedMemoryError):
        ingot.torch.save_model(model, path, shared="error")


def test_load_model_reports_two_tensors_for_a_tied_one(path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Twice().state_dict().items()}
    ingot.torch.save_file(state, path)
    missing, unexpected = ingot.torch.load_model(Twice(), path, strict=False)
    assert (missing, sorted(unexpected)) == (set(), ["b.bias", "b.weight"])


class Hooked(nn.Module):
    """A module with a hook for older files, which have another name and store tied tensors once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a
        self.done = 0
        # The oldest torch lacks the name without the underscore.
        self._register_load_state_dict_pre_hook(self._rename, with_module=True)
        self.register_load_state_dict_post_hook(self._finish)

    @staticmethod
    def _rename(module: Any, state: dict[str, torch.Tensor], *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"a.{name}"] = state[f"b.{name}"] = state.pop(f"old.{name}")

    @staticmethod
    def _finish(module: Any, keys: Any) -> None:
        module.done += 1


def test_load_model_runs_hooks(path: Path) -> None:
    ingot.torch.save_file({"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2)}, path)
    model = Hooked()
    # The hook provides both names, which the file lacks. Neither is reported as missing or unexpected.
    assert ingot.torch.load_model(model, path) == (set(), [])
    assert model.done == 1
    assert (model.b.weight == 1).all()


def test_load_model_warns_of_another_dtype(path: Path) -> None:
    ingot.torch.save_model(nn.Linear(2, 2), path)
    model = nn.Linear(2, 2).half()
    with pytest.warns(UserWarning, match=r"converted 2 tensors.*`bias`, `weight`"):
        assert ingot.torch.load_model(model, path) == (set(), [])
    assert model.weight.dtype == torch.float16


def test_save_model_packs_or_rejects_strided_tensors(path: Path) -> None:
    model = nn.Module()
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    with pytest.raises(ValueError, match="non contiguous tensor: `turned`"):
        ingot.torch.save_model(model, path, force_contiguous=False)
    ingot.torch.save_model(model, path)
    assert torch.equal(ingot.torch.load_file(path)["turned"], model.turned)  # type: ignore[arg-type]


def test_save_model_shortens_long_lists_of_names(path: Path) -> None:
    state = torch.zeros(100)
    model = nn.Module()
    for number in range(6):
        model.register_buffer(f"part{number}", state[:50])
    with pytest.raises(ingot.SharedMemoryError, match="`part0`, `part1`, `part2` and 3 more"):
        ingot.torch.save_model(model, path)
