"""Every reader takes every kind of source, with equal results. `sources.toml` has the exceptions."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest
import torch
from torch.distributed import checkpoint

import ingot
import ingot.dcp
import ingot.modelspec
import ingot.numpy
import ingot.torch
from support.doors import public_functions
from support.objects import NAME, OBJECTS
from support.servers import serving
from support.shards import folder as served

INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "weight": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "bias": numpy.ones(2, numpy.float32),
}
# As `save_state` describes a dict of these.
TREE = '{"version":1,"framework":"numpy","tree":{"weight":{"$tensor":"weight"},"bias":{"$tensor":"bias"}}}'
TEXT = {"made": "by hand", "modelspec.title": "Ducks"}
METADATA = {**TEXT, "ingot.state": TREE}
PLAIN = {name: array.tolist() for name, array in WEIGHTS.items()}


# Kinds of sources. -----------------------------------------------------------------------------------------


def shard(name: str) -> bytes:
    file = io.BytesIO()
    ingot.numpy.save_file({name: WEIGHTS[name]}, file, checksums="blake3")
    return file.getvalue()


@cache
def model() -> bytes:
    file = io.BytesIO()
    ingot.numpy.save_state(WEIGHTS, file, TEXT, checksums="blake3")
    return file.getvalue()


@cache
def shards() -> dict[str, bytes]:
    """The same model as an index and two files."""
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(WEIGHTS, 1)}
    index = json.dumps({"metadata": METADATA, "weight_map": names})
    return {INDEX: index.encode(), **{file: shard(name) for name, file in names.items()}}


def at(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def one(folder: Path) -> Path:
    return at({NAME: model()}, folder / "one")


PATHS: dict[str, Callable[[Path], Any]] = {
    "str": lambda folder: str(one(folder) / NAME),
    "bytes": lambda folder: os.fsencode(one(folder) / NAME),
    "PathLike": lambda folder: one(folder) / NAME,
    "file URL": lambda folder: (one(folder) / NAME).as_uri(),
    "directory": one,
    "directory of shards": lambda folder: at(shards(), folder / "shards"),
    "index": lambda folder: at(shards(), folder / "shards") / INDEX,
}
URLS = {"URL": lambda: {NAME: model()}, "URL of an index": shards}
KINDS = (*PATHS, *URLS, *OBJECTS)
GROUPS = {"objects": [*OBJECTS], "urls": [*URLS]}


def source_of(kind: str, folder: Path, closing: ExitStack) -> Any:
    if kind in PATHS:
        return PATHS[kind](folder)
    if kind in URLS:
        files = URLS[kind]()
        return closing.enter_context(serving(served(files))).url(f"/model/{next(iter(files))}")
    found = OBJECTS[kind](model(), folder)
    closing.callback(getattr(found, "close", lambda: None))
    return found


# Readers. --------------------------------------------------------------------------------------------------


def known(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return the metadata that is equal for one file and for shards: all but the digests."""
    return {key: text for key, text in (metadata or {}).items() if key in METADATA}


def opened(source: Any, _: Path, call: Callable[..., Any]) -> object:
    with call(source) as file:
        return {name: array.tolist() for name, array in file.items()}, known(file.metadata())


def loaded(source: Any, _: Path, module: str, function: str = "load_file") -> object:
    load = getattr(import_module(module), function)
    return {name: numpy.asarray(tensor).tolist() for name, tensor in load(source).items()}


def filled(source: Any, _: Path, call: Callable[..., Any]) -> object:
    linear = torch.nn.Linear(3, 2)
    call(linear, source)
    return {name: tensor.tolist() for name, tensor in linear.state_dict().items()}


def open_model(source: Any, _: Path, call: Callable[..., Any]) -> object:
    found = call(source)
    tensors = {
        name: (info.dtype, info.shape, info.parameter_count)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    }
    return sorted(tensors.items()), known(found.metadata), found.parameter_count, sorted(found.weight_map)


def hashed(source: Any, _: Path) -> object:
    return [ingot.hash(source, algorithm) for algorithm in ("sha256", "blake3", "autov2", "md5")]


def verified(source: Any, _: Path) -> object:
    report = ingot.verify(source)
    return report.ok, report.algorithm, report.checked


def written(source: Any, folder: Path, call: Callable[..., Any]) -> object:
    out = folder / "out"
    out.mkdir()
    call(source, out)
    # A directory, if it has shards.
    [*new] = out.iterdir()
    with ingot.open(out if len(new) > 1 else new[0]) as file:
        return {name: array.tolist() for name, array in file.items()}, known(file.metadata())


def compared(source: Any, folder: Path) -> object:
    other = folder / "other.safetensors"
    ingot.numpy.save_file({**WEIGHTS, "bias": numpy.zeros(2, "f4")}, other, TEXT)
    found = ingot.diff(source, other, values=True)
    return found.tensors, found.values


def patched(source: Any, folder: Path) -> object:
    other, patch, result = (folder / f"{name}.safetensors" for name in ("other", "patch", "result"))
    ingot.numpy.save_file({**WEIGHTS, "bias": numpy.zeros(2, "f4")}, other, TEXT)
    ingot.delta.diff(source, other, patch)
    ingot.delta.apply(source, patch, result)
    return result.read_bytes() == other.read_bytes(), ingot.delta.info(patch).tensors


def refused(source: Any, folder: Path, call: Callable[[Any, Path], object]) -> object:
    """Return that the model is no patch."""
    with pytest.raises(ingot.SafetensorError):
        call(source, folder)
    return "refused"


def shown(source: Any, _: Path) -> object:
    with ingot.view(source, source, how="server") as both:
        assert both.url
    return ingot.view(source, how="page").url


def loaded_by_dcp(source: Any, _: Path) -> object:
    state = {name: torch.zeros(array.shape) for name, array in WEIGHTS.items()}
    with warnings.catch_warnings(action="ignore"):
        # torch warns that there is one process only.
        checkpoint.load({**state}, storage_reader=ingot.dcp.Reader(source), no_dist=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "flax": "jax", "tensorflow": "tensorflow", "mlx": "mlx"}
FRAMEWORKS["paddle"] = "paddle"
READERS: dict[str, Callable[[Any, Path], object]] = {
    "ingot.open": partial(opened, call=ingot.open),
    "ingot.safe_open": partial(opened, call=ingot.safe_open),
    **{
        f"ingot.{module}.load_file": partial(loaded, module=f"ingot.{module}")
        for module, needed in FRAMEWORKS.items()
        if find_spec(needed)
    },
    **{
        f"ingot.{module}.load_state": partial(loaded, module=f"ingot.{module}", function="load_state")
        for module in ("numpy", "torch", "flax")
        if find_spec(FRAMEWORKS[module])
    },
    "ingot.torch.load_into": partial(filled, call=ingot.torch.load_into),
    "ingot.torch.load_model": partial(filled, call=ingot.torch.load_model),
    "ingot.dcp.Reader": loaded_by_dcp,
    "ingot.inspect": partial(open_model, call=ingot.inspect),
    "ingot.inspect_async": partial(open_model, call=lambda source: asyncio.run(ingot.inspect_async(source))),
    "ingot.hash": hashed,
    "ingot.verify": verified,
    "ingot.merge": partial(written, call=lambda source, out: ingot.merge([source], out / NAME)),
    "ingot.rewrite": partial(written, call=lambda source, out: ingot.rewrite(source, out / NAME)),
    "ingot.split": partial(written, call=lambda source, out: ingot.split(source, out, 24)),
    "ingot.repair": partial(written, call=lambda source, out: ingot.repair(source, out / NAME)),
    "ingot.convert": partial(written, call=lambda source, out: ingot.convert(source, out / NAME)),
    "ingot.cast": partial(written, call=lambda source, out: ingot.cast(source, out / NAME, "F64")),
    "ingot.check": lambda source, _: ingot.check(source, values=True).problems,
    "ingot.stats": lambda source, _: ingot.stats(source, bins=2),
    "ingot.diff": compared,
    "ingot.delta.apply": patched,
    "ingot.delta.compose": partial(
        refused, call=lambda source, folder: ingot.delta.compose([source], folder / "composed")
    ),
    "ingot.delta.diff": patched,
    "ingot.delta.info": partial(refused, call=lambda source, _: ingot.delta.info(source)),
    "ingot.delta.items": partial(refused, call=lambda source, _: ingot.delta.items(source)),
    "ingot.view": shown,
    "ingot.modelspec.read": lambda source, _: ingot.modelspec.read(source),
    "ingot.modelspec.validate": lambda source, _: ingot.modelspec.validate(source),
}
#: Functions that accept local paths only.
OTHERS: dict[str, Callable[[Any, Path], object]] = {
    "ingot.warm": lambda source, _: ingot.warm(source),
    "ingot.update_metadata": lambda source, _: ingot.update_metadata(source, {"a": "b"}) and None,
    "ingot.replace_tensor": lambda source, _: ingot.replace_tensor(source, "bias", numpy.zeros(2, "f4")),
}


# Exceptions. -----------------------------------------------------------------------------------------------

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())["exception"]
EXCEPTIONS = {
    (reader, kind): row
    for row in TABLE
    for reader in row["readers"]
    for group in row["kinds"]
    for kind in GROUPS.get(group, [group])
}
PAIRS = [(reader, kind) for reader in READERS for kind in KINDS]
PAIRS += [(reader, kind) for reader in OTHERS for kind in KINDS if (reader, kind) in EXCEPTIONS]


@cache
def expected(reader: str, folder: Path) -> object:
    """Return the result of a reader for the path of a file."""
    return READERS[reader](str(folder / NAME), folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    def result(reader: str) -> object:
        folder = tmp_path_factory.mktemp("plain") / "one"
        at({NAME: model()}, folder)
        return expected(reader, folder)

    return result


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("reader", "kind"), PAIRS, ids=[f"{reader}-{kind}" for reader, kind in PAIRS])
def test_readers_take_every_source(
    reader: str, kind: str, plain: Callable[[str], object], closing: ExitStack, tmp_path: Path
) -> None:
    source = source_of(kind, tmp_path, closing)
    read = READERS.get(reader) or OTHERS[reader]
    exception = EXCEPTIONS.get((reader, kind))
    if exception is None:
        assert read(source, tmp_path) == plain(reader)
        assert not getattr(source, "closed", False)
    elif "error" not in exception:
        assert read(source, tmp_path) != plain(reader)
    else:
        with pytest.raises(Exception, match=re.escape(exception["words"])) as caught:
            read(source, tmp_path)
        assert type(caught.value).__name__ == exception["error"]
        assert getattr(caught.value, "code", None) == exception.get(
            "code", getattr(caught.value, "code", None)
        )


def test_readers_return_the_model(plain: Callable[[str], object]) -> None:
    assert plain("ingot.open")[0] == PLAIN  # type: ignore[index]
    for reader in READERS:
        if "load" in reader or reader == "ingot.dcp.Reader":
            assert plain(reader) == PLAIN, reader


def test_sources_table_has_every_reader() -> None:
    functions = {**public_functions(), "ingot.dcp.Reader": ingot.dcp.Reader}
    taking = {
        name
        for name, function in functions.items()
        for one in inspect.signature(function).parameters.values()
        if re.search(r"\bSource\b", str(one.annotation))
    }
    assert taking == READERS.keys()


def test_sources_table_has_reasons_for_existing_pairs_only() -> None:
    assert {reader for reader, _ in EXCEPTIONS} <= READERS.keys() | OTHERS.keys()
    assert {kind for _, kind in EXCEPTIONS} <= set(KINDS)
    assert all(len(row["why"]) > 20 for row in TABLE)


@pytest.mark.parametrize("wrong", [3, None, 1.5, object()])
def test_readers_name_a_wrong_source(wrong: Any, tmp_path: Path) -> None:
    for name, read in READERS.items():
        if name == "ingot.dcp.Reader":
            # torch raises another error, with the words of this one.
            continue
        (tmp_path / name).mkdir()
        with pytest.raises(TypeError, match=f"found {type(wrong).__name__}"):
            read(wrong, tmp_path / name)


OURS = (
    "ingot.open ingot.safe_open ingot.inspect ingot.inspect_async ingot.hash ingot.verify ingot.merge "
    "ingot.rewrite ingot.split ingot.repair ingot.view ingot.modelspec.read ingot.modelspec.validate "
    "ingot.warm"
)


@pytest.mark.parametrize("name", OURS.split())
def test_readers_have_resolved_type_hints(name: str) -> None:
    function = public_functions()[name]
    hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    assert hints["return"] is not None
