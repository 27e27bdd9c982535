"""Random files of every format, with tensors in every place that the format has.

Each tensor is converted with equal values, or listed as left out. In the second case an error names it
if a conversion selects it.
The libraries of the formats write the files.

`INGOT_CONVERSIONS` sets the number of files; `make nightly` makes more.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import h5py
import ml_dtypes
import msgpack
import numpy
import onnx
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from onnx import helper, numpy_helper

import ingot
from ingot.numpy import load_file, save_file
from support.record import note

from .test_convert_msgpack import packed_array
from .test_convert_pickles import as_python_2
from .test_convert_torch import repacked

FILES = int(os.environ.get("INGOT_CONVERSIONS", "240"))
FILES_OF_ONE_TEST = 500

Array = numpy.ndarray[Any, Any]
PLAIN = ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8")
WORDS = ("w", "b", "a.b", "layers", "0", "模", "x y", "[0]", "weight", "é")


@dataclass
class Source:
    """A file with its contents."""

    path: str
    tensors: dict[str, Array] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    """What is no tensor of numbers, or has no meaning."""
    barred: set[str] = field(default_factory=set)
    """What no file of tensors can hold."""


def values(chance: random.Random, dtype: Any, shape: tuple[int, ...]) -> Array:
    """An array of any bytes, or of 0 and 1 for booleans."""
    dtype = numpy.dtype(dtype)
    count = int(numpy.prod(shape, dtype=int))
    if dtype.kind == "b":
        return numpy.array(chance.choices((False, True), k=count)).reshape(shape).astype(bool)
    return numpy.frombuffer(chance.randbytes(count * dtype.itemsize), dtype).reshape(shape).copy()


def shape(chance: random.Random, least: int = 0) -> tuple[int, ...]:
    return tuple(
        chance.choice((1, 2, 3, 5, 0 if chance.random() < 0.1 else 4))
        for _ in range(chance.randint(least, 4))
    )


def array(chance: random.Random, dtypes: tuple[Any, ...] = PLAIN, least: int = 0) -> Array:
    found = values(chance, chance.choice(dtypes), shape(chance, least))
    how = chance.randrange(4)
    if how == 0:
        return numpy.asfortranarray(found)
    if how == 1 and found.ndim:
        return numpy.concatenate([found, found])[::2] if found.shape[0] else found
    if how == 2 and found.dtype.isbuiltin == 1:
        return found.astype(found.dtype.newbyteorder(">"))
    return found


def name(chance: random.Random, taken: Any) -> str:
    found = chance.choice(WORDS)
    while found in taken:
        found += chance.choice(WORDS)
    return found


def named(chance: random.Random, make: Callable[[], Any], most: int = 5) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(chance.randint(1, most)):
        found[name(chance, found)] = make()
    return found


def nested(chance: random.Random, make: Callable[[], Any], depth: int = 0) -> Any:
    """A tree of dicts and lists."""
    if depth == 3 or (depth and chance.random() < 0.5):
        return make()
    if chance.random() < 0.7 or not depth:
        return named(chance, lambda: nested(chance, make, depth + 1), 3)
    return [nested(chance, make, depth + 1) for _ in range(chance.randint(1, 3))]


def leaves(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, list, tuple)) and not hasattr(tree, "dtype"):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*keys, str(key)))
    else:
        yield ".".join(keys), tree


def as_npz(chance: random.Random) -> Source:
    dtypes = (*PLAIN, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)
    arrays = named(chance, lambda: array(chance, dtypes))
    source = Source("in.npz", dict(arrays))
    others: dict[str, Any] = {
        "fours": values(chance, ml_dtypes.float8_e4m3fn, (3,)),
        "void": numpy.zeros(2, "V2"),
        "text": numpy.array(["a"]),
        "objects": numpy.array([None], object),
        "records": numpy.zeros(2, [("a", "f4")]),
    }
    chosen = chance.sample(sorted(others), 2)
    if chance.random() < 0.2:
        others["wide"] = numpy.ones(2, "c16")
        chosen.append("wide")
        source.barred.add("wide")
    source.listed = {f"{other}.npy" for other in chosen if other != "wide"}
    save = chance.choice((numpy.savez, numpy.savez_compressed))
    save(source.path, **arrays, **{other: others[other] for other in chosen})
    with numpy.load(source.path, allow_pickle=True) as read:
        assert set(read.files) == {*arrays, *chosen}
    return source


def as_npy(chance: random.Random) -> Source:
    made = array(chance, (*PLAIN, ml_dtypes.bfloat16))
    numpy.save("in.npy", made)
    return Source("in.npy", {"tensor": made})


TORCH = (
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)
NEW_TORCH = (*TORCH, torch.bfloat16, torch.complex64, torch.uint16, torch.uint32, torch.float8_e4m3fn)


def tensor(chance: random.Random, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    dtype = chance.choice(dtypes)
    raw = torch.tensor(list(chance.randbytes(64 * 8)), dtype=torch.uint8)
    whole = raw.ne(7) if dtype is torch.bool else raw.view(dtype)[:48]
    how = chance.randrange(7)
    if how == 0:
        return whole[:24].reshape(4, 6).t()
    if how == 1:
        return whole[1:25:3]
    if how == 2:
        return whole[5]
    if how == 3:
        return whole[:0].reshape(0, 3)
    if how == 4:
        return whole[:1].expand(3, 2)
    if how == 5 and dtype is torch.complex64:
        return whole[:3].conj()
    return torch.nn.Parameter(whole[:6], requires_grad=False) if how == 6 else whole[:12].reshape(3, 4)


def as_array(tensor: torch.Tensor) -> Array:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        word = str(plain.dtype).removeprefix("torch.")
        integers = torch.int16 if plain.dtype is torch.bfloat16 else torch.uint8
        found: Array = plain.view(integers).numpy().view(getattr(ml_dtypes, word))
        return found
    return plain.numpy()


def odd_torch(chance: random.Random) -> Any:
    return chance.choice(
        (
            torch.ones(2, dtype=torch.complex128),
            torch.eye(3).to_sparse(),
            torch.empty(2, device="meta"),
            zipfile.ZipInfo("x"),
        )
    )


def as_torch(chance: random.Random) -> Source:
    is_old = chance.random() < 0.4
    dtypes = TORCH if is_old else NEW_TORCH
    tree = nested(chance, lambda: tensor(chance, dtypes))
    shared = tensor(chance, dtypes)
    tree["shared"] = [shared, shared, shared[:1] if shared.ndim else shared]
    source = Source("in.pt", {key: as_array(value) for key, value in leaves(tree)})
    tree |= {"epoch": 3, "others": {"size": torch.Size([2]), "dtype": torch.float16, "none": None}}
    source.listed = {"epoch", "others"}
    if chance.random() < 0.3:
        tree["odd"] = odd_torch(chance)
        (source.listed if isinstance(tree["odd"], zipfile.ZipInfo) else source.barred).add("odd")
    if chance.random() < 0.1:
        tree["cache"] = {(0, chance.random()): torch.ones(2)}
        source.barred.add("cache.(tuple)")
    protocol = chance.choice((2, 2, 3, 4, 5))
    torch.save(tree, "in.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=not is_old)
    if not is_old and chance.random() < 0.3:
        source.path = repacked("in.pt", "packed.pt", zipfile.ZIP_DEFLATED)
    return source


def as_pickle(chance: random.Random) -> Source:
    tree = nested(chance, lambda: array(chance, (*PLAIN, ml_dtypes.bfloat16)))
    source = Source("in.pkl", dict(leaves(tree)))
    tree |= {"n": 5, "text": numpy.array(["a"]), "time": numpy.zeros(2, "M8[s]")}
    source.listed = {"n", "text", "time"}
    if chance.random() < 0.3:
        tree["objects"] = numpy.array([{}], object)
        source.barred = {"objects"}
    protocol = chance.randrange(pickle.HIGHEST_PROTOCOL + 1)
    data = pickle.dumps(tree, protocol)
    if protocol == 2 and chance.random() < 0.5:
        data = as_python_2(data)
    Path("in.pkl").write_bytes(data)
    return source


class Reduced:
    """An object that is pickled like a tensor of paddle."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def as_paddle(chance: random.Random) -> Source:
    """Return a file like one of `paddle.save`: arrays with a table of their names, or pickled tensors."""
    arrays = named(chance, lambda: array(chance, ("<f4", "<i8", "<u2", "<f2", "?")))
    halves = {key: one for key, one in arrays.items() if one.dtype == numpy.uint16}
    source = Source(
        "in.pdparams", arrays | {k: v.astype("<u2").view(ml_dtypes.bfloat16) for k, v in halves.items()}
    )
    if chance.random() < 0.5:
        tree: Any = {
            **arrays,
            "StructuredToParameterName@@": {key: f"p_{key}" for key in arrays},
            "LR": {"n": 3},
        }
        source.listed = {"LR"}
    else:
        ways = (lambda one: Reduced(tuple, ("n", one)), lambda one: Reduced(eval, "data", {"data": one}))
        tree = {"model": {key: chance.choice(ways)(one) for key, one in arrays.items()}}
        source.tensors = {f"model.{key}": one for key, one in source.tensors.items()}
    Path("in.pdparams").write_bytes(pickle.dumps(tree, chance.choice((2, 3, 4))))
    return source


def fill_hdf5(chance: random.Random, file: h5py.File, source: Source) -> None:
    for key, one in named(chance, lambda: array(chance)).items():
        where = "/".join(["g" * chance.randint(1, 3)] * chance.randint(0, 2) + [key.replace(".", "_")])
        if where in file:
            continue
        options = (
            {"compression": "gzip", "chunks": True} if one.size and one.ndim and chance.random() < 0.3 else {}
        )
        made = file.create_dataset(where, data=one, **options)
        source.tensors[where] = one
        if chance.random() < 0.3:
            made.attrs["scale"] = numpy.ones(2)
            source.listed.add(f"{where}@scale")
        if chance.random() < 0.2:
            file[f"hard_{len(source.tensors)}"] = made
            source.tensors[f"hard_{len(source.tensors)}"] = one
    file["soft"] = h5py.SoftLink("/nowhere")
    file["text"] = "hello"
    file["nothing"] = h5py.Empty("f4")
    source.listed |= {"soft", "text", "nothing"}
    if chance.random() < 0.3:
        half = values(chance, ml_dtypes.bfloat16, (3, 2))
        file.create_dataset("half", data=half).attrs["dtype"] = "bfloat16"
        source.tensors["half"] = half
        source.listed.add("half@dtype")
    if chance.random() < 0.2:
        file["far"] = h5py.ExternalLink("/etc/passwd", "/")
        source.barred.add("far")
    if chance.random() < 0.2:
        file["wide"] = numpy.ones(2, "c16")
        source.barred.add("wide")


def as_hdf5(chance: random.Random) -> Source:
    source = Source("in.h5")
    block = chance.choice((0, 0, 512, 2048))
    with h5py.File("in.h5", "w", userblock_size=block) as file:
        fill_hdf5(chance, file, source)
    if block:
        source.listed.add("user block")
    return source


def as_keras(chance: random.Random) -> Source:
    source = Source("in.keras", listed={"config.json"})
    with h5py.File("model.weights.h5", "w") as file:
        fill_hdf5(chance, file, source)
    method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile("in.keras", "w", method) as archive:
        archive.writestr("config.json", "{}")
        archive.write("model.weights.h5")
    return source


def as_flax(chance: random.Random) -> Source:
    dtypes = (*PLAIN, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
    tree = nested(
        chance, lambda: numpy.ascontiguousarray(values(chance, chance.choice(dtypes), shape(chance)))
    )
    source = Source("in.msgpack", dict(leaves(tree)), {"step"})

    def packed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: packed(one) for key, one in value.items()}
        return [packed(one) for one in value] if isinstance(value, list) else packed_array(value)

    Path("in.msgpack").write_bytes(msgpack.packb({**packed(tree), "step": 3}, use_bin_type=True))
    return source


ONNX = (
    "?",
    "i1",
    "u1",
    "<i2",
    "<u2",
    "<i4",
    "<u4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    ml_dtypes.bfloat16,
)


class OnnxModel:
    """A model that is built step by step, with tensors in all places that may hold one."""

    def __init__(self, chance: random.Random, source: Source) -> None:
        self.chance, self.source, self.number = chance, source, 0

    def tensor(self, key: str, title: str) -> onnx.TensorProto:
        kind = self.chance.random()
        if kind < 0.05:
            self.source.barred.add(key)
            return numpy_helper.from_array(numpy.arange(4).astype(ml_dtypes.int4), title)
        if kind < 0.1:
            one = (values(self.chance, "u1", (2, 4)) & 15).view(ml_dtypes.float4_e2m1fn)
        else:
            one = values(self.chance, self.chance.choice(ONNX), shape(self.chance))
        self.source.tensors[key] = one
        return numpy_helper.from_array(one, title)

    def nodes(self, prefix: str, depth: int) -> Iterator[onnx.NodeProto]:
        for _ in range(self.chance.randint(0, 3)):
            yield from self.node(prefix, self.chance.randrange(6 if depth < 2 else 4))

    def node(self, prefix: str, kind: int) -> Iterator[onnx.NodeProto]:
        self.number += 1
        out, chance = f"v{self.number}", self.chance
        key = f"{prefix}{out}"
        if kind == 0:
            title = chance.choice(("", "other"))
            yield helper.make_node("Constant", [], [out], value=self.tensor(key, title))
        elif kind == 1:
            numbers = [float(numpy.float32(chance.random())) for _ in range(chance.randint(1, 3))]
            self.source.tensors[key] = numpy.array(numbers, "f4")
            yield helper.make_node("Constant", [], [out], value_floats=numbers)
        elif kind == 2:
            self.source.tensors[key] = numpy.array(1 << 40, "i8")
            yield helper.make_node("Constant", [], [out], value_int=1 << 40)
        elif kind == 3:
            many = [self.tensor(f"{prefix}{out}.t.{number}", "") for number in range(2)]
            yield helper.make_node("Odd", [], [out], out, t=many)
        elif kind == 4:
            inner = self.graph(f"{prefix}{out}.then_branch.", 2)
            yield helper.make_node("If", ["w"], [out], out, then_branch=inner)
        else:
            self.source.listed.add(f"{prefix}{out}.coefficients")
            yield helper.make_node("Linear", ["w"], [out], out, domain="ai.onnx.ml", coefficients=[1.0])

    def graph(self, prefix: str, depth: int) -> onnx.GraphProto:
        made = helper.make_graph(list(self.nodes(prefix, depth)), "g", [], [])
        for number in range(self.chance.randint(0, 3)):
            made.initializer.append(self.tensor(f"{prefix}i{number}", f"i{number}"))
        if self.chance.random() < 0.2:
            made.sparse_initializer.append(
                helper.make_sparse_tensor(
                    helper.make_tensor("sparse", onnx.TensorProto.FLOAT, [1], [1]),
                    helper.make_tensor("indices", onnx.TensorProto.INT64, [1], [0]),
                    [3],
                )
            )
            self.source.listed.add(f"{prefix}sparse")
        return made


def as_onnx(chance: random.Random) -> Source:
    source = Source("in.onnx")
    maker = OnnxModel(chance, source)
    made = helper.make_model(maker.graph("", 0))
    # One tensor that can be converted.
    made.graph.initializer.append(numpy_helper.from_array(numpy.ones(2), "w"))
    source.tensors["w"] = numpy.ones(2)
    if chance.random() < 0.3:
        made.functions.add(name="f", domain="local").node.extend(maker.nodes("local.f.", 1))
    if chance.random() < 0.2:
        initial = maker.graph("training_0.initialization.", 1)
        made.training_info.add().initialization.CopyFrom(initial)
    outside = chance.random() < 0.4
    onnx.save(made, "in.onnx", save_as_external_data=outside, location="data.bin", size_threshold=0)
    return source


def as_gguf(chance: random.Random) -> Source:
    source, kind = Source(""), gguf.GGMLQuantizationType.Q8_0
    count = chance.choice((1, 1, 2, 3))
    for number in range(count):
        path = f"m-{number + 1:05}-of-{count:05}.gguf" if count > 1 else "in.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("words", ["a", "b"])
        if count > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)
        for key in range(chance.randint(1, 3)):
            one = values(
                chance, chance.choice(("<f4", "<f2", "i1", "<i2", "<i4", "<i8", "<f8")), shape(chance, 1)
            )
            if one.size:
                writer.add_tensor(f"t{number}.{key}", one)
                source.tensors[f"t{number}.{key}"] = one
        if chance.random() < 0.3:
            writer.add_tensor(f"q{number}", gguf.quantize(numpy.ones((2, 32), "f4"), kind), raw_dtype=kind)
            source.barred.add(f"q{number}")
        writer.add_tensor(f"last{number}", numpy.ones(2, "f4"))
        source.tensors[f"last{number}"] = numpy.ones(2, "f4")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source.path = chance.choice((source.path or path, path))
    source.listed = {"words"}
    return source


def as_columns(chance: random.Random) -> Source:
    rows = chance.randint(1, 5)
    columns, source = {}, Source("in.data", listed={"text"})
    for key in named(chance, lambda: 0):
        width = chance.randint(1, 3)
        one = values(chance, chance.choice(("<i4", "u1", "<f4", "<f8", "<i8")), (rows, width))
        flat = pa.FixedSizeListArray.from_arrays(pa.array(one.reshape(-1)), width)
        columns[key], source.tensors[key] = flat, one
    columns["text"] = pa.array(["a"] * rows)
    table = pa.table(columns)
    how = chance.randrange(3)
    if how == 0:
        pyarrow.parquet.write_table(table, source.path, row_group_size=2)
    else:
        make = pa.ipc.new_file if how == 1 else pa.ipc.new_stream
        with pa.OSFile(source.path, "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return source


def as_ours(chance: random.Random) -> Source:
    dtypes = ("?", "i1", "u1", "<i2", "<u2", "<i4", "<f4", "<f8", ml_dtypes.bfloat16)
    arrays = {
        key: numpy.ascontiguousarray(one) for key, one in named(chance, lambda: array(chance, dtypes)).items()
    }
    if chance.random() < 0.5:
        save_file(arrays, chance.choice(("in.safetensors", "in.bt")))
        return Source(next(entry for entry in os.listdir() if entry.startswith("in.")), arrays)
    weight_map = {}
    for number, (key, one) in enumerate(arrays.items()):
        weight_map[key] = f"m-{number + 1:05}-of-{len(arrays):05}.safetensors"
        save_file({key: one}, weight_map[key])
    Path(chance.choice(("model.safetensors.index.json", "model.safetensors.index.fp16.json"))).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return Source(".", arrays)


MAKERS = (
    *(as_npz, as_npy, as_torch, as_torch, as_pickle, as_paddle, as_hdf5, as_keras),
    *(as_flax, as_onnx, as_onnx, as_gguf, as_columns, as_ours),
)


def lost(source: Source, found: dict[str, Array], report: ingot.Conversion) -> list[str]:
    """Return the tensors that are lost or wrong, or that the source does not have."""
    faults = [f"{key} is not listed" for key in source.listed - {one.name for one in report.left_out}]
    faults += [f"{key} was made up" for key in found.keys() - source.tensors.keys()]
    for key, expected in source.tensors.items():
        native = expected.astype(expected.dtype.newbyteorder("="))
        if key not in found:
            faults.append(f"{key} is lost")
        elif (found[key].dtype, found[key].shape) != (native.dtype, native.shape):
            faults.append(f"{key} is {found[key].dtype} {found[key].shape}")
        elif found[key].tobytes() != native.tobytes():
            faults.append(f"{key} has other values")
    return faults


def converted(seed: int) -> list[str]:
    """Return the faults in the conversion of the file of this seed."""
    chance = random.Random(seed)
    source = MAKERS[seed % len(MAKERS)](chance)
    out = Path(tempfile.mkdtemp(dir=".")) / "out.safetensors"
    if source.barred:
        try:
            ingot.convert(source.path, out, durable=False)
        except ingot.ConversionError as error:
            if error.tensor not in source.barred:
                return [f"raised of {error.tensor}: {error}"]
        else:
            return [f"{source.barred} were converted"]
    report = ingot.convert(source.path, out, durable=False, drop=sorted(source.barred) or None)
    found = load_file(out, backend="pread")
    return lost(source, found | {other: found[of] for other, of in report.shared.items()}, report)


@pytest.mark.parametrize("first", range(0, FILES, FILES_OF_ONE_TEST))
@pytest.mark.filterwarnings("ignore")
def test_convert_loses_nothing_and_invents_nothing(first: int, tmp_path: Path) -> None:
    count, faults = 0, []
    for seed in range(first, min(first + FILES_OF_ONE_TEST, FILES)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        os.chdir(folder)
        try:
            said = converted(seed)
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
        faults += [f"{MAKERS[seed % len(MAKERS)].__name__} {seed}: {one}" for one in said]
        os.chdir(tmp_path)
        shutil.rmtree(folder)
        count += 1
    note("conversions of generated files", count, len(faults))
    assert faults == []
