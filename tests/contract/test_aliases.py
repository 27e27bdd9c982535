"""Every function and command that takes the name of a tensor accepts an alias (``ingot.shared``).

The tensors are those that `ingot.torch.load_file` returns under these names.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.commands import good, run
from support.servers import Handler, Request, serving

BASE = torch.arange(40.0).reshape(10, 4)
WINDOWS = torch.arange(7.0)
TENSORS = {
    "base": BASE,
    "column": BASE[:, 1],
    "flat": BASE.view(-1),
    "other": torch.ones(3),
    "row": BASE[2:3],
    "same": BASE,
    "scalar": BASE[3, 2],
    "transposed": BASE.t(),
    # Two rows of three elements. The last element of one is the first of the other.
    "windows": WINDOWS.unfold(0, 3, 2)[:2],
    "z": WINDOWS,
}
STORED = ["base", "other", "z"]
ALIASES = [name for name in TENSORS if name not in STORED]
OPEN: list[Any] = ["mmap", "pread", "memory", "sharded"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aliases")
    ingot.torch.save_file(TENSORS, folder / "a.safetensors", shared="alias", checksums="xxh3")
    ingot.torch.save_file(TENSORS, folder / "copy.safetensors", shared="copy")
    ingot.split(folder / "a.safetensors", folder / "shards", 100)
    return folder


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return folder / "a.safetensors"


@pytest.fixture(params=OPEN)
def source(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a source, and the options to open it."""
    if request.param == "memory":
        return bytearray((folder / "a.safetensors").read_bytes()), {}
    if request.param == "sharded":
        return folder / "shards", {}
    return folder / "a.safetensors", {"backend": request.param}


@pytest.fixture(params=ALIASES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def same(found: Any, expected: torch.Tensor) -> None:
    assert numpy.asarray(found).shape == tuple(expected.shape)
    assert numpy.array_equal(numpy.asarray(found), expected.numpy())


def indices(tensor: torch.Tensor) -> list[Any]:
    found: list[Any] = [(), ..., None]
    if tensor.dim():
        found += [0, -1, slice(1, None), slice(None, None, 2), [tensor.shape[0] - 1, 0], (..., 0)]
    if tensor.dim() > 1:
        found += [(slice(None), slice(1, 3)), (0, [1, 0]), (slice(None), [1, 0])]
    return found


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_handles_read_aliases(source: tuple[Any, dict[str, Any]], framework: Any, name: str) -> None:
    expected = TENSORS[name]
    with ingot.safe_open(source[0], framework, **source[1]) as file:
        assert file.keys() == file.offset_keys() == [*file] == STORED
        assert len(file) == 3
        assert name in file
        for found in (file.get_tensor(name), file[name], file.get(name), file.get_tensors([name])[name]):
            same(found, expected)
        part = file.get_slice(name)
        assert (part.get_shape(), part.get_dtype()) == (list(expected.shape), "F32")
        for index in indices(expected):
            same(part[index], torch.tensor(expected.numpy()[index]))
        info = file.info(name)
        assert (info.name, info.dtype, info.shape) == (name, "F32", tuple(expected.shape))
        assert info.nbytes == 4 * expected.numel()
        assert [*file.get_tensors(f"{name[:-1]}?")] == [name]
        assert file.shard_of(name) == file.shard_of("z" if name == "windows" else "base")
        with file.prefetch({name: None}) as loader:
            same(loader.take(name), expected)
        with file.prefetch(keys=[name, "base"]) as loader:
            assert {found: [*tensor.shape] for found, tensor in loader} == {
                name: [*expected.shape],
                "base": [10, 4],
            }
        if expected.dim():
            with file.prefetch({name: slice(1, None)}) as loader:
                same(loader.take(name), expected[1:])


def test_handles_list_no_aliases_and_reject_unknown_names(source: tuple[Any, dict[str, Any]]) -> None:
    with ingot.open(source[0], **source[1]) as file:
        assert "rows" not in file
        assert file.get("rows") is None
        with pytest.raises(ingot.TensorNotFoundError):
            file.get_tensor("rows")
        assert sorted(file.get_tensors()) == STORED
        assert sorted(file.get_tensors("*")) == sorted(TENSORS)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("load", [ingot.numpy.load_file, ingot.torch.load_file], ids=["numpy", "torch"])
def test_load_file_loads_aliases_and_their_parts(
    source: tuple[Any, dict[str, Any]], load: Callable[..., Any], verify: bool, name: str
) -> None:
    how: Any = {**source[1], "verify": verify}
    expected = TENSORS[name]
    same(load(source[0], keys=[name], **how)[name], expected)
    same(load(source[0], keys=name, dtype="F64", **how)[name], expected.double())
    found = load(source[0], keys=["base", name, "other"], **how)
    assert [*found] == ["base", name, "other"]
    same(found[name], expected)
    for index in indices(expected):
        if index is not None:
            found = load(source[0], keys=[name], slices={name: index}, **how)
            same(found[name], torch.tensor(expected.numpy()[index]))
    places = {"base": torch.empty(10, 4), name: torch.empty(expected.shape)}
    out = places if load is ingot.torch.load_file else {one: place.numpy() for one, place in places.items()}
    load(source[0], keys=[*out], out=out, **how)
    same(places["base"], BASE)
    same(places[name], expected)


@pytest.mark.parametrize("verify", [False, True])
def test_load_into_fills_tensors_from_aliases(
    source: tuple[Any, dict[str, Any]], verify: bool, name: str
) -> None:
    target = {"base": torch.empty(10, 4), name: torch.empty(TENSORS[name].shape)}
    keys = ingot.torch.load_into(target, source[0], strict=False, verify=verify, **source[1])
    assert keys.missing_keys == []
    same(target[name], TENSORS[name])
    same(target["base"], BASE)


def test_load_into_fills_views_once(path: Path) -> None:
    base, windows = torch.empty(10, 4), torch.empty(7)
    target = {
        "base": base,
        "column": base[:, 1],
        "flat": base.view(-1),
        "other": torch.empty(3),
        "row": base[2:3],
        "same": base,
        "scalar": base[3, 2],
        "transposed": base.t(),
        "windows": windows.unfold(0, 3, 2)[:2],
        "z": windows,
    }
    ingot.torch.load_into(target, path)
    for name, expected in TENSORS.items():
        same(target[name], expected)


def test_functions_of_values_accept_aliases(path: Path, folder: Path, name: str) -> None:
    expected = TENSORS[name]
    stats = ingot.stats(path, keys=[name], bins=4).tensors[name]
    assert stats.count == expected.numel()
    assert (stats.min, stats.max) == (expected.min().item(), expected.max().item())
    assert stats.mean == pytest.approx(expected.mean().item())
    assert sum(stats.bins) == expected.numel()
    assert ingot.check(path, keys=[name], values=True)
    assert not ingot.diff(path, folder / "copy.safetensors", keys=[name], values=True).tensors
    assert not ingot.diff(path, folder / "copy.safetensors", keys=[name], values=True).values
    assert ingot.warm(path, keys=[name]) > 0


def test_diff_compares_aliases_with_stored_tensors(path: Path, folder: Path) -> None:
    found = ingot.diff(path, folder / "copy.safetensors", values=True)
    assert (found.tensors, found.values) == ({}, {})
    found = ingot.diff(folder / "copy.safetensors", path)
    assert found.tensors == {}


def test_functions_that_write_accept_aliases(path: Path, tmp_path: Path, name: str) -> None:
    expected = TENSORS[name]
    for write in (
        lambda to: ingot.rewrite(path, to, keys=[name]),
        lambda to: ingot.merge([path], to, keys=[name]),
        lambda to: ingot.convert(path, to, keys=[name]),
    ):
        write(tmp_path / "out.safetensors")
        found = ingot.numpy.load_file(tmp_path / "out.safetensors")
        assert [*found] == [name]
        same(found[name], expected)
        (tmp_path / "out.safetensors").unlink()
    ingot.rewrite(path, tmp_path / "new.safetensors", rename={name: "new"})
    same(ingot.torch.load_file(tmp_path / "new.safetensors")["new"], expected)
    cast = ingot.cast(path, tmp_path / "half.safetensors", "F16", keys=[name])
    assert cast.cast == ("z" if name == "windows" else "base",)
    same(ingot.torch.load_file(tmp_path / "half.safetensors")[name], expected.half())


def test_commands_accept_aliases(path: Path, folder: Path, tmp_path: Path, name: str) -> None:
    expected = TENSORS[name]
    assert run("ls", path, "-q").out.split() == sorted(STORED)
    assert good("ls", path, "--keys", name).rows() == [[name, "F32", str([*expected.shape])]]
    assert good("info", path, name, "--json").json()["nbytes"] == 4 * expected.numel()
    assert good("cat", path, name, "--json").json()["values"] == expected.tolist()
    if expected.dim():
        assert good("cat", path, f"{name}[1:]", "--json").json()["values"] == expected[1:].tolist()
    assert good("stats", path, name, "--json").json()["tensors"][name]["max"] == expected.max()
    assert len(good("tree", path, "--keys", name).rows()) == 1
    good("check", path, "--values", "--keys", name)
    ended = run("diff", path, folder / "copy.safetensors", "--values", "--keys", name)
    assert {row[1] for row in ended.rows()} == {"metadata: ingot.checksums", "metadata: ingot.shared"}
    good("export", path, name, "-d", tmp_path)
    same(numpy.load(tmp_path / f"{name}.npy"), expected)
    good("export", path, name, "--raw", "-o", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == expected.contiguous().numpy().tobytes()
    good("rename", path, tmp_path / "r.safetensors", "--name", name, "new", "--keys", name)
    same(ingot.numpy.load_file(tmp_path / "r.safetensors")["new"], expected)
    good("convert", path, tmp_path / "c.safetensors", "--keys", name)
    same(ingot.numpy.load_file(tmp_path / "c.safetensors")[name], expected)
    good("cast", path, tmp_path / "h.safetensors", "--dtype", "F16", "--keys", name)
    same(ingot.torch.load_file(tmp_path / "h.safetensors")[name], expected.half())


@pytest.mark.parametrize("lenient", [False, True])
def test_broken_record_has_no_aliases_and_is_named_by_reads(tmp_path: Path, lenient: bool) -> None:
    path = tmp_path / "broken.safetensors"
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({"__metadata__": {"ingot.shared": "no record"}, "a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    with ingot.open(path, lenient=lenient) as file:
        assert "a" in file
        assert "x" not in file
        assert file.get("x", default=3) == 3
        assert bytes(file.get_tensor("a")) == b"ab"
        with pytest.raises(ingot.SafetensorError, match=r"`ingot.shared` is not a record"):
            file.get_tensor("x")


def test_lookup_of_an_unknown_name_in_a_silent_shard_keeps_the_deadline(tmp_path: Path) -> None:
    index = json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors"}}).encode()
    is_over = threading.Event()

    def answer(handler: Handler, request: Request) -> None:
        if request.path.endswith(".json"):
            handler.part(index, request, ETag='"1"')
        else:
            is_over.wait(60)

    options = {"retries": 0, "timeout": 1}
    with serving(answer) as server:
        try:
            file = ingot.open(server.url("/m/model.safetensors.index.json"), storage_options=options)
            for lookup in (file.shard_of, file.get_tensor, file.info, file.get, file.__contains__):
                with pytest.raises(ingot.StorageError, match="timed out"):
                    lookup("x")
        finally:
            is_over.set()
