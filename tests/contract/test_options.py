"""Every option has one meaning: `options.toml` says which function takes it, or why not."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.dcp
import ingot.lora
import ingot.numpy
import ingot.torch
from ingot import typing as groups
from ingot._adapters.face import Whole
from ingot.numpy import mover, payload, wrap
from support import stores
from support.public_api import is_method, parameters, public_api

TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))
REASONS: dict[str, str] = TABLE.pop("reasons")
WRITING = [
    "metadata",
    "background",
    *groups.SaveOptions.__annotations__,
    *groups.WriteOptions.__annotations__,
]
GROUPS: dict[str, list[str]] = {
    "reading": list(groups.ReadOptions.__annotations__),
    "selecting": list(groups.SelectOptions.__annotations__),
    "checking": list(groups.CheckOptions.__annotations__),
    "layout": list(groups.LayoutOptions.__annotations__),
    "writing": [name for name in WRITING if name != "write_options"],
    "sharding": list(groups.ShardOptions.__annotations__),
}
OPTIONS = {option for options in GROUPS.values() for option in options}


def taken_by(function: Any) -> list[str]:
    """Return the options that a function takes, and the keys of its `write_options`."""
    names = [name for name in parameters(function) if name in OPTIONS or name == "write_options"]
    if "write_options" in names:
        names.remove("write_options")
        names += function._rare
    return names


# Methods without options need no row.
API = {name: found for name, found in public_api().items() if not is_method(name) or taken_by(found)}


def test_options_table_has_every_function() -> None:
    assert TABLE.keys() == API.keys()


@pytest.mark.parametrize("name", TABLE)
def test_options_table_agrees_with_the_signatures(name: str) -> None:
    row = TABLE[name]
    assert set(row["yes"]) == set(taken_by(API[name]))
    for option in OPTIONS - set(row["yes"]):
        of = [group for group, options in GROUPS.items() if option in options]
        reasons = [row[key] for key in (option, *of) if key in row]
        assert reasons, f"{name} lacks {option}, and its row gives no reason"


@pytest.mark.parametrize("name", TABLE)
def test_options_table_has_no_needless_reason(name: str) -> None:
    row = TABLE[name]
    lacking = OPTIONS - set(row["yes"])
    for key, reason in row.items():
        if key != "yes":
            assert key in GROUPS or key in lacking
            assert REASONS.get(reason, reason)
            assert lacking & set(GROUPS.get(key, [key]))


def test_options_table_uses_every_shared_reason() -> None:
    used = {reason for row in TABLE.values() for key, reason in row.items() if key != "yes"}
    assert used >= REASONS.keys()


# --- values

WHOLE: Whole[Any] = Whole(wrap, mover, lambda array, index: array[index], payload)
ARRAYS = {name: numpy.arange(12, dtype="f4").reshape(4, 3) for name in ("a", "b")}
BUFFERS = {
    name: {"dtype": "F32", "shape": array.shape, "data": array.tobytes()} for name, array in ARRAYS.items()
}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items()}


def use_writer(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.Writer(out, **{"specs": {"a": ("F32", (4, 3))}, **options}) as writer:
        writer.write("a", ARRAYS["a"])
        writer.commit()


def join_writer(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.Writer(out, {"a": ("F32", (4, 3))}, overwrite=True) as first:
        with ingot.Writer.join(out, **options) as writer:
            writer.write("a", ARRAYS["a"])
            writer.commit()
        first.close()


def prefetch(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.safe_open(source, "np") as file, file.prefetch(**options) as loader:
        assert "a" in dict(loader)


def get_tensors(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.safe_open(source, "np") as file:
        assert "a" in file.get_tensors(**options)


def warm(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.safe_open(source, "np") as file:
        file.warm(**options)


def checkpoints(out: Path) -> ingot.Checkpoints:
    return ingot.Checkpoints(out.parent / "run")


def save_step(source: Path, out: Path, /, **options: Any) -> None:
    with checkpoints(out) as made:
        made.save(1, ARRAYS, **options)


def load_step(source: Path, out: Path, /, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = ingot.Checkpoints(folder)
        if source.exists():
            with made:
                made.save(1, ARRAYS)
        made.load(**options)


def filled(source: Path, out: Path, /, **options: Any) -> None:
    ingot.torch.load_into(tensors(), source, **options)


def load_model(source: Path, out: Path, /, **options: Any) -> None:
    model = torch.nn.Module()
    for name, tensor in tensors().items():
        model.register_buffer(name, tensor)
    with warnings.catch_warnings():
        # With `dtype`, a warning about the conversion back to the module's dtype.
        warnings.simplefilter("ignore", UserWarning)
        ingot.torch.load_model(model, source, **{"strict": False, **options})


def save_model(source: Path, out: Path, /, **options: Any) -> Any:
    model = torch.nn.Module()
    for name, tensor in tensors().items():
        model.register_buffer(name, tensor)
    return ingot.torch.save_model(model, out, **options)


class Handler(SimpleHTTPRequestHandler):
    """Serves the files of a directory, and prints nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def download(source: Path, out: Path, /, **options: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(source.parent))) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            ingot.download(f"http://127.0.0.1:{server.server_port}/{source.name}", out, **options)
        finally:
            server.shutdown()
            thread.join()


def upload(source: Path, out: Path, /, **options: Any) -> None:
    with stores.running(is_signed=False) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        ingot.upload(source, f"s3://bucket/{out.name}", **options)


def checkpoint_io(source: Path, out: Path, /, **options: Any) -> None:
    plugin = API["ingot.engines.lightning.CheckpointIO"](**options)
    plugin.save_checkpoint(tensors(), out)
    plugin.teardown()


# With names that `keys` and `drop` select in these tests.
ADAPTER = bytearray(
    ingot.numpy.save(
        ARRAYS | {"lora_te_a.lora_up.weight": ARRAYS["a"], "lora_te_a.lora_down.weight": ARRAYS["a"][:3]}
    )
)


def merge_adapter(source: Path, out: Path, /, **options: Any) -> None:
    ingot.lora.merge(source, ADAPTER, out, **{"strict": False, **options})


def convert_adapter(source: Path, out: Path, /, **options: Any) -> None:
    adapter = source.with_name("adapter.safetensors")
    if source.exists():
        adapter.write_bytes(ADAPTER)
    # An adapter has no tensors with such names.
    with suppress(ingot.AdapterError):
        ingot.lora.convert(adapter, out, "kohya", **options)


def no_change(source: Path) -> bytearray:
    """Return the patch from a file to itself, or nothing if there is no file."""
    if not source.exists():
        return bytearray()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "patch.safetensors")
        ingot.delta.diff(source, source, path)
        return bytearray(path.read_bytes())


# A call of each function with options, by its source and its destination.
Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "ingot.Writer": use_writer,
    "ingot.Writer.join": join_writer,
    "ingot.cast": lambda source, out, /, **options: ingot.cast(source, out, **{"dtype": "F16", **options}),
    "ingot.check": lambda source, out, /, **options: ingot.check(source, **options),
    "ingot.download": download,
    "ingot.upload": upload,
    "ingot.engines.lightning.CheckpointIO": checkpoint_io,
    "ingot.diff": lambda source, out, /, **options: ingot.diff(source, source, **options),
    "ingot.delta.apply": lambda source, out, /, **options: ingot.delta.apply(
        source, no_change(source), **{"destination": None if options.get("in_place") else out, **options}
    ),
    "ingot.delta.compose": lambda source, out, /, **options: ingot.delta.compose(
        [no_change(source)], out, **options
    ),
    "ingot.delta.diff": lambda source, out, /, **options: ingot.delta.diff(source, source, out, **options),
    "ingot.delta.info": lambda source, out, /, **options: ingot.delta.info(no_change(source), **options),
    "ingot.delta.items": lambda source, out, /, **options: list(
        ingot.delta.items(no_change(source), **options)
    ),
    "ingot.stats": lambda source, out, /, **options: ingot.stats(source, **options),
    "ingot.convert": lambda source, out, /, **options: ingot.convert(
        source, out.parent / "shards" if options.get("max_shard_size") else out, **options
    ),
    "ingot.inspect": lambda source, out, /, **options: ingot.inspect(source, **options),
    "ingot.inspect_async": lambda source, out, /, **options: asyncio.run(
        ingot.inspect_async(source, **options)
    ),
    "ingot.hash": lambda source, out, /, **options: ingot.hash(source, **options),
    "ingot.merge": lambda source, out, /, **options: ingot.merge([source], out, **options),
    "ingot.repair": lambda source, out, /, **options: ingot.repair(source, out, **options),
    "ingot.replace_tensor": lambda source, out, /, **options: ingot.replace_tensor(
        source, "a", ARRAYS["a"], **options
    ),
    "ingot.rewrite": lambda source, out, /, **options: ingot.rewrite(source, out, **options),
    "ingot.open": lambda source, out, /, **options: ingot.open(source, **options).close(),
    "ingot.safe_open": lambda source, out, /, **options: ingot.safe_open(source, **options).close(),
    "ingot.safe_open.get_tensors": get_tensors,
    "ingot.safe_open.prefetch": prefetch,
    "ingot.safe_open.warm": warm,
    "ingot.serialize": lambda source, out, /, **options: ingot.serialize(BUFFERS, **options),
    "ingot.serialize_file": lambda source, out, /, **options: ingot.serialize_file(BUFFERS, out, **options),
    "ingot.split": lambda source, out, /, **options: ingot.split(source, out, **options),
    "ingot.update_metadata": lambda source, out, /, **options: ingot.update_metadata(
        source, **{"metadata": {"k": "v"}, **options}
    ),
    "ingot.verify": lambda source, out, /, **options: ingot.verify(source, **options),
    "ingot.warm": lambda source, out, /, **options: ingot.warm(source, **options),
    "ingot.view": lambda source, out, /, **options: ingot.view(source, **{"how": "page", **options}),
    "ingot.lora.convert": convert_adapter,
    "ingot.lora.info": lambda source, out, /, **options: ingot.lora.info(ADAPTER, **options),
    "ingot.lora.merge": merge_adapter,
    "ingot.modelspec.read": lambda source, out, /, **options: ingot.modelspec.read(source, **options),
    "ingot.modelspec.validate": lambda source, out, /, **options: ingot.modelspec.validate(source, **options),
    "ingot.numpy.load_file": lambda source, out, /, **options: ingot.numpy.load_file(source, **options),
    "ingot.numpy.save": lambda source, out, /, **options: ingot.numpy.save(ARRAYS, **options),
    "ingot.numpy.save_file": lambda source, out, /, **options: ingot.numpy.save_file(ARRAYS, out, **options),
    "ingot.torch.load_file": lambda source, out, /, **options: ingot.torch.load_file(source, **options),
    "ingot.torch.load_into": filled,
    "ingot.torch.load_model": load_model,
    "ingot.torch.save": lambda source, out, /, **options: ingot.torch.save(tensors(), **options),
    "ingot.torch.save_file": lambda source, out, /, **options: ingot.torch.save_file(
        tensors(), out, **options
    ),
    "ingot.torch.save_model": save_model,
    "ingot.Checkpoints": lambda source, out, /, **options: ingot.Checkpoints(out.parent / "run", **options),
    "ingot.Checkpoints.save": save_step,
    "ingot.Checkpoints.load": load_step,
    "ingot.Checkpoints.latest": lambda source, out, /, **options: checkpoints(out).latest(**options),
    "ingot.torch.save_state": lambda source, out, /, **options: ingot.torch.save_state(
        tensors(), out, **options
    ),
    "ingot.torch.load_state": lambda source, out, /, **options: ingot.torch.load_state(source, **options),
    "ingot.numpy.save_state": lambda source, out, /, **options: ingot.numpy.save_state(
        ARRAYS, out, **options
    ),
    "ingot.numpy.load_state": lambda source, out, /, **options: ingot.numpy.load_state(source, **options),
    "ingot.torch.save_sharded": lambda source, out, /, **options: ingot.torch.save_sharded(
        tensors(), out, **options
    ),
    "ingot.dcp.Reader": lambda source, out, /, **options: ingot.dcp.Reader(source, **options),
    "ingot.dcp.Writer": lambda source, out, /, **options: ingot.dcp.Writer(out, **options),
    "ingot.<framework>.load_file": lambda source, out, /, **options: WHOLE.load_file(source, **options),
    "ingot.<framework>.save": lambda source, out, /, **options: WHOLE.save(ARRAYS, **options),
    "ingot.<framework>.save_file": lambda source, out, /, **options: WHOLE.save_file(ARRAYS, out, **options),
}

GOOD: dict[str, list[Any]] = {
    "backend": ["auto", "mmap", "pread"],
    "threads": [None, 1, numpy.int64(2)],
    "progress": [True, False, None, lambda done, total: None],
    "storage_options": [None, {}, {"retries": 1, "anon": True}],
    "max_header_size": [None, 100_000],
    "keys": [None, "a", "*", ["a"], ingot.glob("a", "b*")],
    "drop": [None, "b", ["b"], ingot.glob("b*")],
    "slices": [None, {"a": slice(0, 4)}],
    "dtype": ["F16", "bfloat16", numpy.float16],
    "verify": [False, True],
    "expected_sha256": [None],
    "dequantize": [False, True, "F32", "bfloat16", numpy.float16],
    "remap": [None, [ingot.remap.select("*")], ingot.remap.Rules([], strict=False)],
    "metadata": [None, {}, {"k": "v"}],
    "format": ["safetensors", "bintensors"],
    "overwrite": [False, True],
    "atomic": [False, True],
    "durable": [None, False, True],
    "checksums": [None, False, True, "xxh3", ["sha256", "modelspec"]],
    "background": [False, True],
    "align": [8, 4096],
    "reserve_header": [0, 1000],
    "replace_read_only": [False, True],
    "snapshot": [False, True, "host", "device"],
    "max_shard_size": [40, numpy.int16(40), "5GB", "0.1 kb"],
    "filename_pattern": ["x{suffix}.safetensors", "{suffix}.bt"],
}
BAD: dict[str, list[Any]] = {
    "backend": ["disk", "MMAP", 1],
    "threads": [0, -1, "2", True, 1.0],
    "progress": [1, "yes"],
    "storage_options": [{"nope": 1}, {"retries": "x"}, 7],
    "max_header_size": [-1, 0, 2**64, "1", True],
    "keys": [7, [7], b"a"],
    "drop": [7, [7], b"a"],
    "dtype": ["I8", "nope", 7],
    "verify": [1, "yes", None],
    "expected_sha256": ["12", "x" * 64, 5],
    "dequantize": ["F8_E4M3", "I8", "yes", 7, None],
    "remap": ["a", 7, [7], {"a": "b"}],
    "metadata": [7, {"a": 1}, {1: "a"}],
    "format": ["x", 3],
    "overwrite": [1, "yes", None],
    "atomic": [0, "no", None],
    "durable": ["yes", 1],
    "checksums": ["md5", ["sha256", "xxh3"], 7, "", 0, {}],
    "background": [1, None],
    "align": [7, 0, "64", True],
    "reserve_header": [-1, 2**64, "1", 1.5, True],
    "replace_read_only": [1, "yes"],
    "snapshot": ["gpu", 2, None],
    "max_shard_size": [0, -5, "5MiB", "many", True, 1.5],
    "filename_pattern": ["model.safetensors", "a/{suffix}", "{suffix}{suffix}", 5],
}
# Functions with other values for an option.
APART = {("format", "ingot.convert")}


def functions_with(option: str) -> list[str]:
    return [name for name, row in TABLE.items() if option in row["yes"]]


def given(option: str, value: Any) -> dict[str, Any]:
    return (
        {"write_options": {option: value}}
        if option in groups.WriteOptions.__annotations__
        else {option: value}
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "model.safetensors"
    path.parent.mkdir()
    # A state too: the tree of the same two tensors.
    ingot.numpy.save_state(ARRAYS, path, {"format": "pt"}, checksums=True, durable=False)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_options_table_is_tested_completely() -> None:
    assert CALLS.keys() == {name for name, row in TABLE.items() if row["yes"]}
    assert GOOD.keys() == OPTIONS
    assert BAD.keys() == OPTIONS - {"slices"}


# Names and patterns that select everything.
@pytest.mark.filterwarnings("ignore:rewrite.*change nothing:UserWarning")
@pytest.mark.parametrize("option", GOOD)
def test_options_take_the_same_values_everywhere(
    option: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_DURABLE", "0")
    before = source.read_bytes()
    for number, (name, value) in enumerate(
        (name, value) for name in functions_with(option) for value in GOOD[option]
    ):
        out = (
            tmp_path / str(number) / ("model" if "shard" in name or "split" in name else "model.safetensors")
        )
        out.parent.mkdir()
        options = given(option, value) | ({"background": True} if option == "snapshot" else {})
        done = CALLS[name](source, out, **options)
        if isinstance(done, ingot.SaveFuture):
            done.result(60)
        source.write_bytes(before)


@pytest.mark.parametrize("option", BAD)
def test_options_reject_the_same_values_everywhere(option: str, tmp_path: Path) -> None:
    """The errors have the same class, code and words. They come before the (missing) source is opened."""
    source = tmp_path / "nothing.safetensors"
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"as it was")
    before = contents(tmp_path)
    for value in BAD[option]:
        said: dict[tuple[type, Any, str], list[str]] = {}
        for name in functions_with(option):
            if name.startswith("ingot.safe_open.") or (option, name) in APART:
                # A handle is open already.
                continue
            called = name.rpartition(".")[2]
            with pytest.raises((TypeError, ingot.OptionError)) as caught:
                CALLS[name](source, out, **given(option, value))
            message = str(caught.value)
            assert message.startswith(f"{called}(): "), (name, value, message)
            assert option in message
            outcome = (caught.type, getattr(caught.value, "code", None), message.partition("(): ")[2])
            said.setdefault(outcome, []).append(name)
            assert contents(tmp_path) == before, (name, value)
        assert len(said) == 1, (option, value, said)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("ingot.numpy.load_file", "backend"),
        ("ingot.numpy.save_file", "format"),
        ("ingot.numpy.save_file", "snapshot"),
        ("ingot.numpy.save_file", "checksums"),
    ],
)
def test_options_reject_an_unknown_word_with_their_code(name: str, option: str, tmp_path: Path) -> None:
    with pytest.raises(ingot.OptionError) as caught:
        CALLS[name](tmp_path / "nothing", tmp_path / "out", **given(option, "nope"))
    assert caught.value.code == f"unknown-{option}"


@pytest.mark.parametrize(("name", "format"), [("m.bt", "bintensors"), ("m.safetensors", "safetensors")])
def test_save_file_takes_the_format_from_the_name(name: str, format: str, tmp_path: Path) -> None:
    ingot.numpy.save_file(ARRAYS, tmp_path / name)
    assert (tmp_path / name).read_bytes() == ingot.numpy.save(ARRAYS, format=format)


def test_convert_passes_the_write_options_on(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "arrays.npz", **ARRAYS)
    ingot.convert(tmp_path / "arrays.npz", tmp_path / "m.safetensors", write_options={"align": 4096})
    header_nbytes = int.from_bytes((tmp_path / "m.safetensors").read_bytes()[:8], "little")
    assert (8 + header_nbytes) % 4096 == 0


def test_safe_open_refuses_with_strict_what_it_accepts_without(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes((3).to_bytes(8, "little") + b" {}")
    ingot.safe_open(tmp_path / "m", "np").close()
    with pytest.raises(ingot.HeaderError):
        ingot.safe_open(tmp_path / "m", "np", strict=True)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if "align" in row["yes"]])
def test_write_options_name_the_nearest_key(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ingot.OptionError, match=r"write_options has no key 'aligned': did you mean 'align'\?"
    ) as caught:
        CALLS[name](tmp_path / "nothing", tmp_path / "out", write_options={"aligned": 8})
    assert caught.value.code == "unknown-write-option"
    assert str(caught.value).endswith(f"It takes {', '.join(API[name]._rare)}")


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if "overwrite" in row["yes"]])
def test_overwrite_is_needed_to_replace_a_file(name: str, source: Path, tmp_path: Path) -> None:
    if name in ("ingot.dcp.Writer", "ingot.lora.convert", "ingot.upload"):
        pytest.skip("it writes no file with these names")
    is_folder = name in ("ingot.split", "ingot.torch.save_sharded")
    out = tmp_path / "out" if is_folder else tmp_path / "model.safetensors"
    path = out / "model.safetensors" if is_folder else out
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"as it was")
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        CALLS[name](source, out, overwrite=False)
    assert os.fspath(path) in str(caught.value)
    assert path.read_bytes() == b"as it was"
    assert sorted(os.listdir(path.parent)) == sorted(
        {path.name} | ({source.parent.name} if not is_folder else set())
    )
    CALLS[name](source, out, overwrite=True)
    # A patch of equal files has none of their tensors.
    expected = "header/0" if name in ("ingot.delta.compose", "ingot.delta.diff") else "a"
    assert expected in ingot.numpy.load_file(path)


# --- wrong keywords, and wrong values of every parameter with a default


def get(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.safe_open(source) as file:
        file.get("a", **options)


def write_part(source: Path, out: Path, /, **options: Any) -> None:
    with ingot.Writer(out, {"a": ("F32", (4, 3))}) as writer:
        writer.write("a", ARRAYS["a"], **options)


BYTES = ingot.numpy.save(ARRAYS)
# Calls of functions that have no option of a group.
MORE_CALLS: dict[str, Call] = {
    "ingot.Ranges": lambda source, out, /, **options: ingot.Ranges(STORE, "path", **options),
    "ingot.Writer.write": write_part,
    "ingot.safe_open.get": get,
    "ingot.modelspec.metadata": lambda source, out, /, **options: ingot.modelspec.metadata(
        **{"architecture": "a", "implementation": "b", "title": "c", **options}
    ),
    "ingot.torch.load": lambda source, out, /, **options: ingot.torch.load(
        ingot.numpy.save(ARRAYS), **options
    ),
    "ingot.<framework>.load": lambda source, out, /, **options: WHOLE.load(
        ingot.numpy.save(ARRAYS), **options
    ),
}
EVERY_CALL = CALLS | MORE_CALLS


class Store:
    """A store with nothing in it."""

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        raise FileNotFoundError(path)


STORE = Store()
# `other` is a source, and an error may be about the source.
SOURCES = {("ingot.view", "other"), ("ingot.torch.load_into", "source")}
STRANGE: list[Any] = [5, "x", -1, 10**30, None, object(), True, b"", float("nan"), [5]]
INTEGERS = {
    "ahead",
    "bins",
    "height",
    "index",
    "max_header_size",
    "max_nbytes",
    "max_shard_size",
    "nbytes",
    "threads",
}
# Errors about a value that would be valid for other files, or on other machines. No file has the empty path.
OF_FILES = (
    FileNotFoundError,
    ingot.AdapterError,
    ingot.ConversionError,
    ingot.DeviceError,
    ingot.HeaderError,
    ingot.SaveError,
    ingot.SliceError,
    ingot.TensorNotFoundError,
)


def optional(function: Any) -> list[str]:
    """Return the parameters that a caller may leave out."""
    given = inspect.signature(function).parameters.values()
    return [
        one.name
        for one in given
        if one.kind is one.KEYWORD_ONLY
        or (one.default is not one.empty and one.kind is not one.POSITIONAL_ONLY)
    ]


EVERY_OPTION = [
    (name, option)
    for name, function in public_api().items()
    for option in optional(function)
    if (name, option) not in SOURCES
]


def test_options_table_calls_every_function() -> None:
    assert {name for name, _ in EVERY_OPTION} <= EVERY_CALL.keys()


@pytest.mark.parametrize("name", dict(EVERY_OPTION))
def test_options_name_the_nearest_keyword(name: str, source: Path, tmp_path: Path) -> None:
    options = optional(public_api()[name])
    wrong = options[-1] + "s"
    with pytest.raises(TypeError) as caught:
        EVERY_CALL[name](source, tmp_path / "out", **{wrong: 1})
    message = str(caught.value)
    assert message.startswith(f"{name.rpartition('.')[2]}() got an unexpected keyword argument {wrong!r}: ")
    assert f"did you mean {options[-1]!r}?" in message
    assert all(option in message.partition("It takes")[2] for option in options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", dict(EVERY_OPTION))
def test_options_take_or_name_a_strange_value(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error names function and option, and leaves no file."""
    # Text is a path for some options.
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out" / ("model" if "shard" in name or "split" in name else "model.safetensors")
    out.parent.mkdir()
    called = name.rpartition(".")[2]
    for option in optional(public_api()[name]):
        for value in [] if (name, option) in SOURCES else STRANGE:
            error = fault_of(name, source, out, {option: value})
            if error is None:
                shutil.rmtree(out.parent)
                out.parent.mkdir()
                continue
            where = f"{option}={value!r}: {error!r}"
            assert not os.listdir(out.parent), where
            if not isinstance(error, OF_FILES) and getattr(error, "path", None) is None:
                assert isinstance(error, TypeError | ValueError), where
                assert str(error).startswith(f"{called}(): "), where
                assert option in str(error), where


@pytest.mark.parametrize("name", dict(EVERY_OPTION))
def test_options_take_integers_of_numpy(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / ("model" if "shard" in name or "split" in name else "model.safetensors")
    for option in {option for other, option in EVERY_OPTION if other == name} & INTEGERS:
        faults = []
        for number, kind in enumerate((int, numpy.int64, numpy.uint8)):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            faults.append(fault_of(name, source, tmp_path / str(number) / out.name, {option: kind(5)}))
        assert {type(fault) for fault in faults} == {type(faults[0])}, (option, faults)


def fault_of(name: str, source: Path, out: Path, options: dict[str, Any]) -> Exception | None:
    """Return the error of a call."""
    try:
        done = EVERY_CALL[name](source, out, **options)
        if isinstance(done, ingot.SaveFuture):
            done.result(60)
    except Exception as error:
        return error
    return None
