"""Records about tensors in metadata: aliases, digests, the totals of an index."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot._native import CHECKSUMS_KEY, MODEL_SPEC_KEY, SHARED_KEY, STALE_KEYS
from support.errors import raises

W = torch.arange(6.0).reshape(2, 3)
Z = torch.full((4,), -1.0)
TIED = {"dec": W, "enc": W, "z": Z}
PARTS = {"big": W, "row": W[1:2], "same": W[1:2], "column": W[:, 1]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(tensors: dict[str, torch.Tensor], path: str = "f.safetensors", **options: Any) -> str:
    ingot.torch.save_file(tensors, path, shared="alias", **options)
    return path


def loaded(path: str) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in sorted(ingot.torch.load_file(path).items())}


def stored(path: str) -> list[str]:
    with ingot.safe_open(path, "pt") as file:
        return file.keys()


def record(path: str) -> Any:
    return json.loads((ingot.inspect(path).metadata or {}).get(SHARED_KEY, "null"))


# --- files made from tensors of other files ---


def test_rewrite_keeps_aliases_if_their_tensor_is_renamed() -> None:
    ingot.rewrite(saved(TIED), "g", rename={"dec": "x", "z": "dec"}, overwrite=True)
    assert loaded("g") == {"dec": Z.tolist(), "enc": W.tolist(), "x": W.tolist()}
    assert record("g") == {"enc": {"of": "x"}}
    saved({"dec": Z}, "other")
    ingot.merge(["other", "f.safetensors"], "g", on_duplicate="first", overwrite=True)
    assert loaded("g") == {"dec": Z.tolist(), "enc": W.tolist(), "z": Z.tolist()}
    assert stored("g") == ["dec", "enc", "z"]


def test_rewrite_renames_and_selects_aliases() -> None:
    path = saved(TIED)
    ingot.rewrite(path, "g", rename=lambda name: f"model.{name}", overwrite=True)
    assert loaded("g") == {f"model.{name}": tensor.tolist() for name, tensor in TIED.items()}
    ingot.rewrite(path, "g", rename={"enc": "tied"}, keys=ingot.glob("d*", "e*"), drop="dec", overwrite=True)
    assert (loaded("g"), stored("g")) == ({"tied": W.tolist()}, ["tied"])
    ingot.rewrite(path, "g", drop="enc", overwrite=True)
    assert (loaded("g"), record("g")) == ({"dec": W.tolist(), "z": Z.tolist()}, None)
    saved({"enc": Z}, "other")
    with raises(ingot.SaveError, code="duplicate-tensor", tensor="enc") as caught:
        ingot.merge([path, "other"], "h", overwrite=True)
    assert path in str(caught.value)
    assert "other" in str(caught.value)
    with pytest.raises(ingot.SaveError):
        ingot.rewrite(path, "h", rename={"enc": "z"}, overwrite=True)
    assert not os.path.exists("h")


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}, {SHARED_KEY: '{"z":{"of":"dec"}}'}])
def test_metadata_option_neither_removes_nor_adds_aliases(metadata: Any) -> None:
    ingot.rewrite(saved(TIED), "g", metadata=metadata)
    assert loaded("g") == loaded("f.safetensors")
    ingot.split("f.safetensors", "folder", 10, metadata=metadata)
    assert loaded("folder") == loaded("f.safetensors")


def test_split_keeps_aliases_in_the_shard_of_their_tensor() -> None:
    ingot.split(saved(TIED), "folder", 24)
    assert loaded("folder") == loaded("f.safetensors")
    with open("folder/model.safetensors.index.json") as file:
        assert set(json.load(file)["weight_map"]) == {"dec", "z"}
    ingot.convert("f.safetensors", "converted/", max_shard_size=24)
    assert loaded("converted") == loaded("f.safetensors")
    ingot.merge(["folder"], "again")
    assert (loaded("again"), record("again")) == (loaded("f.safetensors"), {"enc": {"of": "dec"}})


def test_rewrite_stores_a_part_whose_tensor_is_dropped() -> None:
    path = saved(PARTS | {"z": Z}, checksums="xxh3")
    ingot.rewrite(path, "g", drop="big", overwrite=True)
    assert loaded("g") == {name: part for name, part in loaded(path).items() if name != "big"}
    assert (stored("g"), record("g")) == (["column", "row", "z"], {"same": {"of": "row"}})
    assert ingot.verify("g").ok
    # "middle" contains the other parts.
    whole = torch.arange(10.0)
    saved({"whole": whole, "middle": whole[2:9], "inside": whole[3:5].view(2, 1), "twin": whole[2:9]}, "h")
    ingot.rewrite("h", "g", drop="whole", overwrite=True)
    assert loaded("g") == {name: part for name, part in loaded("h").items() if name != "whole"}
    assert stored("g") == ["middle"]
    found = ingot.torch.load_file("g")
    found["middle"][1] = 70
    assert found["inside"][0, 0] == found["twin"][1] == 70


@pytest.mark.parametrize("code", sorted(ingot.torch.DTYPES))
def test_rewrite_stores_parts_of_every_dtype(code: str) -> None:
    dtype = ingot.torch.DTYPES[code]
    base = torch.arange(48, dtype=torch.uint8)
    base = (base % 2).bool().reshape(6, 8) if code == "BOOL" else base.reshape(6, 8).view(dtype)
    tensors = {"base": base, "column": base[::2, :1], "rows": base[1:3]}
    ingot.rewrite(saved(tensors, checksums="blake3"), "g", drop="base")
    assert ingot.verify("g").ok
    found = ingot.torch.load_file("g")
    for name in ("column", "rows"):
        raw = tensors[name].contiguous()
        assert (found[name].dtype, found[name].shape) == (dtype, raw.shape)
        assert found[name].view(torch.uint8).tolist() == raw.view(torch.uint8).tolist()


def test_rewrite_gathers_a_large_part_in_pieces() -> None:
    base = torch.arange(3_000_000.0).reshape(1500, 2000)
    ingot.rewrite(saved({"base": base, "turned": base.t()}), "g", drop="base")
    assert torch.equal(ingot.torch.load_file("g")["turned"], base.t())


def test_rewrite_and_merge_keep_the_hash_of_their_data() -> None:
    a, b = saved({"a": W}, "a", checksums="modelspec"), saved({}, "b", checksums="modelspec")
    for sources in ([a, b], [b, a]):
        ingot.merge(sources, "g", overwrite=True)
        assert ingot.verify("g").modelspec.same  # type: ignore[union-attr]
    ingot.rewrite(a, "g", metadata={MODEL_SPEC_KEY: "0x00", "a": "b"}, overwrite=True)
    assert ingot.verify("g").modelspec.same  # type: ignore[union-attr]
    ingot.rewrite(a, "g", metadata={"a": "b"}, overwrite=True)
    assert ingot.inspect("g").metadata == {"a": "b"}


def test_convert_keeps_no_false_digest() -> None:
    path = saved(TIED, checksums=["blake3", "modelspec"])
    ingot.convert(path, "g.safetensors", dtype="F16")
    assert (ingot.inspect("g.safetensors").metadata or {}).keys() == {SHARED_KEY}
    ingot.convert(path, "g.safetensors", overwrite=True, drop="dec")
    assert loaded("g.safetensors") == {"enc": W.tolist(), "z": Z.tolist()}
    ingot.convert(saved(PARTS), "h.safetensors", drop="big")
    assert loaded("h.safetensors") == {
        name: part.tolist() for name, part in sorted(PARTS.items()) if name != "big"
    }


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("name", ["format", "total_size", *STALE_KEYS])
def test_convert_and_save_sharded_keep_tied_names(name: str, size: int | None) -> None:
    state = {"a": W, name: W, "z": Z}
    torch.save(state, "model.bin")
    to = "out.safetensors" if size is None else "out/"
    ingot.convert("model.bin", to, max_shard_size=size, metadata={"format": "pt"})
    assert loaded(to) == {key: tensor.tolist() for key, tensor in sorted(state.items())}
    # `save_sharded` stores other names as ordinary metadata, which is not read as a record.
    ingot.torch.save_sharded(state, "sharded", size or 10_000)
    assert loaded("sharded") == {min("a", name): W.tolist(), "z": Z.tolist()}


# --- metadata of one file saved with other tensors ---


def save_model(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str]) -> None:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    ingot.torch.save_model(module, path, metadata)


def write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: {"dtype": "F32", "shape": list(tensor.shape), "data": tensor.numpy().tobytes()}
        for name, tensor in tensors.items()
    }


def to_object(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str], **options: Any) -> None:
    out = io.BytesIO()
    ingot.torch.save_file(tensors, out, metadata, **options)
    write(path, out.getvalue())


def by_writer(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str], **options: Any) -> None:
    with ingot.Writer(path, metadata=metadata, **options, overwrite=True) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.commit()


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


WAYS: dict[str, Callable[[dict[str, torch.Tensor], str, dict[str, str]], object]] = {
    "torch.save_file": ingot.torch.save_file,
    "torch.save_file(shared='alias')": lambda t, p, m: ingot.torch.save_file(t, p, m, shared="alias"),
    "torch.save_file(shared='copy')": lambda t, p, m: ingot.torch.save_file(t, p, m, shared="copy"),
    "torch.save_file(checksums=)": lambda t, p, m: ingot.torch.save_file(t, p, m, checksums="sha256"),
    "torch.save_file(background=)": lambda t, p, m: ingot.torch.save_file(t, p, m, background=True).result(),
    "torch.save": lambda t, p, m: write(p, ingot.torch.save(t, m)),
    "torch.save(shared='alias')": lambda t, p, m: write(p, ingot.torch.save(t, m, shared="alias")),
    "torch.save_model": save_model,
    "torch.save_sharded": lambda t, p, m: ingot.torch.save_sharded(t, p, metadata=m),
    "torch.save_sharded(max_shard_size=)": lambda t, p, m: ingot.torch.save_sharded(t, p, 1, metadata=m),
    "numpy.save_file": lambda t, p, m: ingot.numpy.save_file(arrays(t), p, m),
    "numpy.save": lambda t, p, m: write(p, ingot.numpy.save(arrays(t), m)),
    "serialize": lambda t, p, m: write(p, ingot.serialize(specs(t), m)),
    "serialize_file": lambda t, p, m: ingot.serialize_file(specs(t), p, m),
    "torch.save_file(BytesIO())": to_object,
    "torch.save_file(BytesIO(), checksums=)": lambda t, p, m: to_object(t, p, m, checksums="sha256"),
    "torch.save_file(BytesIO(), shared='alias')": lambda t, p, m: to_object(t, p, m, shared="alias"),
    "Writer": lambda t, p, m: by_writer(t, p, m, specs=t),
    "Writer without specs": lambda t, p, m: by_writer(t, p, m, write_options={"reserve_header": 1000}),
}


@pytest.mark.parametrize("how", WAYS)
def test_save_with_loaded_metadata_stores_its_own_tensors(how: str) -> None:
    pairs = ingot.inspect(saved(TIED, metadata={"a": "b"}, checksums=["blake3", "modelspec"])).metadata
    assert pairs is not None
    assert {CHECKSUMS_KEY, MODEL_SPEC_KEY, SHARED_KEY} < set(pairs)
    # Also signatures, which are valid for the loaded file only.
    pairs = {**dict.fromkeys(STALE_KEYS, "signed"), **pairs}
    for tensors in ({"dec": W + 1, "z": Z}, {"z": Z}, {}):
        path = f"out{len(tensors)}"
        WAYS[how](tensors, path, pairs)
        assert loaded(path) == {name: tensor.tolist() for name, tensor in tensors.items()}
        # All digests of the new file are correct.
        report = ingot.verify(path, raises=False)
        assert not report.bad
        assert not report.missing
        assert report.modelspec is None
        found = ingot.inspect(path).metadata or {}
        assert found["a"] == "b"
        # Kohya's scripts compute these for the tensors that they save.
        assert found.keys() & set(STALE_KEYS) - {CHECKSUMS_KEY} == {"sshs_model_hash", "sshs_legacy_hash"}


def test_index_totals_are_recomputed() -> None:
    pairs = {"total_size": "7", "total_parameters": "7", "a": "b"}
    ingot.torch.save_sharded({"a": W, "z": Z}, "saved", 10, metadata=pairs, overwrite=True)
    ingot.split(saved({"a": W, "z": Z}, metadata=pairs), "split", 10, overwrite=True)
    ingot.convert("f.safetensors", "converted/", max_shard_size=10)
    for path in ("saved", "split", "converted"):
        with ingot.safe_open(path, "pt") as file:
            assert file.metadata() == {"total_size": 40, "a": "b"}
        text = Path(path, "model.safetensors.index.json").read_text()
        Path(path, "model.safetensors.index.json").write_text(text.replace("40", '"40"'))
        ingot.merge([path], "merged", overwrite=True)
        assert (ingot.inspect("merged").metadata or {}).keys() == {"a", "format"}


def test_writer_takes_aliases() -> None:
    by_writer({"dec": W, "z": Z}, "g", {"a": "b"}, specs={"dec": W, "z": Z}, aliases={"enc": "dec"})
    ingot.torch.save_file(TIED, "h", {"a": "b"}, shared="alias")
    assert Path("g").read_bytes() == Path("h").read_bytes()
    for aliases in ({"z": "dec"}, {"enc": "gone"}):
        with raises(ingot.SaveError, code="invalid-alias"):
            ingot.Writer("i", {"dec": W, "z": Z}, aliases=aliases, overwrite=True)
    with pytest.raises(ingot.OptionError):
        ingot.Writer("i", write_options={"reserve_header": 100}, aliases={"enc": "dec"}, overwrite=True)
    assert not os.path.exists("i")


# --- files that are changed ---


def test_replace_tensor_changes_all_aliases() -> None:
    path = saved(PARTS | {"tied": W}, checksums=["blake3", "modelspec"])
    for name in ("tied", "big"):
        ingot.replace_tensor(path, name, torch.full((2, 3), float(len(name))))
        found = ingot.torch.load_file(path, verify=True)
        assert all((tensor == len(name)).all() for tensor in found.values())
        assert set(found) == {*PARTS, "tied"}
    with raises(ingot.SafetensorError, r"`row`.*part of `big`", code="invalid-alias", tensor="row"):
        ingot.replace_tensor(path, "row", torch.zeros(1, 3))
    with pytest.raises(ingot.TensorNotFoundError):
        ingot.replace_tensor(path, "gone", W)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"dec":{"of":"z"}}',
        '{"x":{"of":"gone"}}',
        '{"x":{"of":"z","shape":[5],"stride":[1],"begin":0}}',
    ],
)
@pytest.mark.parametrize("atomic", [True, False])
def test_update_metadata_rejects_an_invalid_alias_record(text: str, atomic: bool) -> None:
    path = saved(TIED)
    before = Path(path).read_bytes()
    with raises(ingot.SafetensorError, code="invalid-alias") as caught:
        ingot.update_metadata(path, {SHARED_KEY: text}, atomic=atomic)
    assert path in str(caught.value)
    assert Path(path).read_bytes() == before
    ingot.update_metadata(path, {SHARED_KEY: '{"x":{"of":"z"}}', "a": "b"}, atomic=atomic)
    assert loaded(path) == {"dec": W.tolist(), "x": Z.tolist(), "z": Z.tolist()}


# --- hostile records ---


def with_record(text: str) -> bytes:
    header = {
        "__metadata__": {SHARED_KEY: text},
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    }
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + Z.numpy().tobytes()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [([2**63 - 1], [1]), ([1], [2**63 - 1]), ([1], [1]), ([2**32, 0], [1, 1])],
)
def test_load_rejects_a_shape_of_any_length(shape: list[int], stride: list[int]) -> None:
    # The full product of a million dimensions takes minutes and cannot be interrupted.
    shape, stride = ([dim[0]] * (1_000_000 - len(dim)) + dim for dim in (shape, stride))
    part = {"of": "a", "shape": shape, "stride": stride, "begin": 0}
    data = with_record(json.dumps({"b": part}))
    Path("f").write_bytes(data)
    calls: list[Callable[[], object]] = [
        lambda: ingot.torch.load(data),
        lambda: ingot.torch.load_file("f"),
        lambda: ingot.torch.load_into({"a": torch.empty(4)}, "f"),
        lambda: ingot.rewrite("f", "g"),
        lambda: ingot.convert("f", "g.safetensors"),
    ]
    for call in calls:
        with raises(ingot.SafetensorError, "more than 64 dimensions", code="invalid-alias"):
            call()
    assert set(ingot.numpy.load_file("f")) == {"a"}


def test_load_shares_memory_of_many_dimensions() -> None:
    many = torch.arange(4.0).reshape(2, 2, *[1] * 63)
    twins = {"a": many, "b": many}
    assert loaded(saved(twins)) == {name: tensor.tolist() for name, tensor in twins.items()}
    fewer = torch.arange(4.0).reshape(2, 2, *[1] * 62)
    tensors = {"a": fewer, "b": fewer.transpose(0, 1)}
    assert loaded(saved(tensors)) == {name: tensor.tolist() for name, tensor in tensors.items()}


# --- folders ---


@pytest.mark.parametrize("where", ["new", "new/below", "there/new", "there"])
def test_copies_that_fail_remove_their_folder(where: str) -> None:
    os.mkdir("there")
    with pytest.raises(ingot.SaveError):
        ingot.torch.save_sharded({"a": torch.zeros(2, dtype=torch.complex128)}, where)
    with pytest.raises(ingot.SaveError):
        ingot.split(
            saved({"a": torch.zeros(2, dtype=torch.complex64)}), where, filename_pattern="m{suffix}.bt"
        )
    with pytest.raises(ingot.SaveError):
        ingot.convert("f.safetensors", f"{where}/", format="bintensors", max_shard_size=10)
    assert sorted(os.listdir()) == ["f.safetensors", "there"]
    assert os.listdir("there") == []


def test_copies_that_fail_keep_files_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **how: object) -> None:
        Path("new/below/theirs").write_text("x")
        raise OSError("no more")

    monkeypatch.setattr("ingot._write.shards.replace_file", failing)
    with pytest.raises(OSError, match="no more"):
        ingot.torch.save_sharded({"a": W, "b": Z}, "new/below", 10)
    assert os.listdir("new/below") == ["theirs"]
