"""Conversion of files that h5py, onnx, gguf and pyarrow wrote."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import h5py
import ml_dtypes
import numpy
import onnx
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from onnx import helper, numpy_helper

import ingot
from ingot import _convert
from ingot._convert import listed
from ingot.numpy import load_file
from support.errors import raises

RANDOM = numpy.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(4, 64)).astype(numpy.float32)


# --- HDF5 ---


def test_convert_reads_datasets_of_hdf5() -> None:
    with h5py.File("in.h5", "w") as file:
        file.create_dataset("dense/kernel", data=WEIGHT, compression="gzip", chunks=(2, 8), shuffle=True)
        file["dense/tied"] = file["dense/kernel"]
        file["big"] = numpy.arange(3, dtype=">i4")
        file["scalar"] = numpy.float64(2.5)
        file["bool"] = numpy.array([True, False])
        file["text"] = "hello"
        file["nothing"] = h5py.Empty("f4")
        file["soft"] = h5py.SoftLink("/big")
        file["loop"] = file["dense"]
    report = ingot.convert("in.h5", "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["dense/kernel"], WEIGHT)
    assert found["big"].tolist() == [0, 1, 2]
    assert found["scalar"] == 2.5
    assert found["bool"].tolist() == [True, False]
    assert report.shared == {"dense/tied": "dense/kernel"}
    assert {one.name for one in report.left_out} == {"text", "nothing", "soft", "loop"}


def linked(file: h5py.File) -> None:
    file["a"] = h5py.ExternalLink("/etc/passwd", "/")


def stored_outside(file: h5py.File) -> None:
    file.create_dataset("a", (4,), "f4", external=[("other.bin", 0, 16)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    file.create_virtual_dataset("a", layout)


@pytest.mark.parametrize("make", [linked, stored_outside, virtual])
def test_convert_rejects_hdf5_links_to_other_files(make: Callable[[h5py.File], None]) -> None:
    Path("other.bin").write_bytes(b"secret secret se")
    with h5py.File("in.h5", "w") as file:
        make(file)
        file["w"] = WEIGHT
    assert ingot.convert("in.h5", "kept.safetensors", keys="w").dropped == ("a",)
    with raises(ingot.ConversionError, r"in.h5: tensor `a`: ", code="outside"):
        ingot.convert("in.h5", "out.safetensors")


def test_convert_rejects_hdf5_filter_plugins() -> None:
    with h5py.File("in.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (1,))
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"a", h5py.h5t.IEEE_F32LE, space, properties)
    with raises(ingot.ConversionError, "number 32015", code="plugin"):
        ingot.convert("in.h5", "out.safetensors")


def test_convert_limits_hdf5_datasets_that_were_never_written() -> None:
    with h5py.File("in.h5", "w") as file:
        file.create_dataset("a", (1 << 40,), "f4", chunks=(1 << 20,))
    with pytest.raises(ingot.ConversionError, match=r"4,398,046,511,104 bytes.*limit is 1,073,741,824"):
        ingot.convert("in.h5", "out.safetensors")


def test_convert_lists_attributes_and_the_user_block_of_hdf5() -> None:
    with h5py.File("in.h5", "w", userblock_size=1024) as file:
        file.attrs["whole"] = numpy.ones(3)
        file.create_dataset("group/w", data=WEIGHT).attrs["scale"] = numpy.float32(2)
        file["group"].attrs["text"] = "x"
    with open("in.h5", "r+b") as raw:
        raw.write(b"#!/bin/sh\n")
    report = ingot.convert("in.h5", "out.safetensors")
    numpy.testing.assert_array_equal(load_file("out.safetensors")["group/w"], WEIGHT)
    assert {one.name for one in report.left_out} == {
        "user block",
        "@whole",
        "group@text",
        "group/w@scale",
    }


def keras_file(path: str, method: int) -> ml_dtypes.bfloat16:
    half = WEIGHT.astype(ml_dtypes.bfloat16)
    with h5py.File("in.weights.h5", "w") as file:
        file.create_dataset("vars/0", data=half).attrs["dtype"] = "bfloat16"
        file["vars/1"] = WEIGHT
        file["vars/2"] = half
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("config.json", "{}")
        archive.write("in.weights.h5", "model.weights.h5")
    return half


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["in.keras", "in.weights.h5"])
def test_convert_reads_bfloat16_as_keras_stores_it(
    name: str, method: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = keras_file("in.keras", method)
    # Temporary files must be beside the new file, not in the system's folder.
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    report = ingot.convert(name, "out.safetensors")
    found = load_file("out.safetensors")
    assert found["vars/0"].tobytes() == half.tobytes()
    assert found["vars/0"].dtype == ml_dtypes.bfloat16
    assert found.keys() == {"vars/0", "vars/1"}
    # The meaning of the other bytes is undefined.
    assert "vars/2" in {one.name for one in report.left_out}
    assert set(listed(name).tensors[0].shape or ()) == {4, 64}


# --- ONNX ---


def model(*tensors: onnx.TensorProto, nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.ModelProto:
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = helper.make_node("Identity", ["w"], ["y"])
    return helper.make_model(helper.make_graph([node, *nodes], "g", [], [output], list(tensors)))


def test_convert_reads_every_tensor_of_an_onnx_model() -> None:
    def tensor(value: float) -> onnx.TensorProto:
        return numpy_helper.from_array(numpy.full(3, value, "f4"), "unused")

    sparse = helper.make_sparse_tensor(
        helper.make_tensor("values", onnx.TensorProto.FLOAT, [1], [1]),
        helper.make_tensor("indices", onnx.TensorProto.INT64, [1], [0]),
        [3],
    )
    inner = helper.make_graph([helper.make_node("Constant", [], ["k"], value=tensor(4))], "inner", [], [])
    nodes = (
        helper.make_node("Constant", [], ["k"], value=tensor(1)),
        helper.make_node("Constant", [], ["floats"], value_floats=[1.0, 2.0]),
        helper.make_node("Constant", [], ["float"], value_float=0.5),
        helper.make_node("Constant", [], ["ints"], value_ints=[7, 8]),
        helper.make_node("Constant", [], ["int"], value_int=2**40),
        helper.make_node("Constant", [], ["text"], value_string="x"),
        helper.make_node("Constant", [], ["sparse"], sparse_value=sparse),
        helper.make_node("Odd", [], ["o"], "odd", t=tensor(2), many=[tensor(3), tensor(5)]),
        helper.make_node("If", ["w"], ["z"], "branch", then_branch=inner),
        helper.make_node("Linear", ["w"], ["l"], "linear", domain="ai.onnx.ml", coefficients=[1.0, 2.0]),
    )
    made = model(numpy_helper.from_array(WEIGHT, "w"), nodes=nodes)
    function = made.functions.add(name="twice", domain="local")
    function.node.append(helper.make_node("Constant", [], ["k"], value=tensor(6)))
    function.attribute_proto.append(helper.make_attribute("bias", tensor(7)))
    made.training_info.add().initialization.initializer.append(numpy_helper.from_array(WEIGHT, "state"))
    Path("in.onnx").write_bytes(made.SerializeToString())
    report = ingot.convert("in.onnx", "out.safetensors")
    found = load_file("out.safetensors")
    expected = {"k": 1, "odd.t": 2, "odd.many.0": 3, "odd.many.1": 5}
    expected |= {"branch.then_branch.k": 4, "local.twice.k": 6, "local.twice.bias": 7}
    assert all(found[name].tolist() == [value] * 3 for name, value in expected.items())
    assert found["floats"].tolist() == [1, 2]
    assert found["float"].tolist() == 0.5
    assert (found["ints"].tolist(), found["int"].tolist()) == ([7, 8], 2**40)
    numpy.testing.assert_array_equal(found["training_0.initialization.state"], WEIGHT)
    assert len(found) == len(expected) + 6
    assert {one.name for one in report.left_out} == {"sparse", "linear.coefficients"}
    assert {one.name for one in listed("in.onnx").tensors} == found.keys()


def test_convert_tells_nodes_of_one_name_apart() -> None:
    nodes = tuple(
        helper.make_node("Odd", [], [f"o{value}"], "odd", t=numpy_helper.from_array(numpy.full(2, value)))
        for value in (1.0, 2.0)
    )
    onnx.save(model(numpy_helper.from_array(WEIGHT, "w"), nodes=nodes), "in.onnx")
    ingot.convert("in.onnx", "out.safetensors")
    found = load_file("out.safetensors")
    assert {name: array.tolist() for name, array in found.items() if name != "w"} == {
        "odd.t": [1, 1],
        "odd_2.t": [2, 2],
    }


@pytest.mark.parametrize("outside", [False, True])
def test_convert_reads_small_floats_of_onnx_and_names_small_integers(outside: bool) -> None:
    fours = numpy.arange(16).reshape(2, 8).astype(ml_dtypes.float4_e2m1fn)
    tensors = [
        numpy_helper.from_array(fours, "four"),
        numpy_helper.from_array(numpy.arange(4).astype(ml_dtypes.int4), "int"),
    ]
    onnx.save(
        model(*tensors), "in.onnx", save_as_external_data=outside, location="data.bin", size_threshold=0
    )
    with pytest.raises(ingot.ConversionError, match=r"tensor `int`: .*int4"):
        ingot.convert("in.onnx", "out.safetensors")
    ingot.convert("in.onnx", "out.safetensors", drop="int")
    assert load_file("out.safetensors")["four"].astype("f4").tolist() == fours.astype("f4").tolist()


def test_convert_does_not_follow_a_link_out_of_the_folder_of_onnx() -> None:
    for folder in ("model", "blobs", "snapshot"):
        Path(folder).mkdir()
    made = model(numpy_helper.from_array(WEIGHT, "w"))
    onnx.save(made, "model/in.onnx", save_as_external_data=True, location="data.bin", size_threshold=0)
    Path("model/data.bin").rename("blobs/data")
    Path("model/data.bin").symlink_to(Path("blobs/data").resolve())
    with raises(ingot.ConversionError, "link out of the folder", code="outside", tensor="w"):
        ingot.convert("model/in.onnx", "out.safetensors")
    # In a cache of downloads, the model is a link to the same folder.
    Path("model/in.onnx").rename("blobs/model")
    Path("snapshot/in.onnx").symlink_to("../blobs/model")
    Path("snapshot/data.bin").symlink_to("../blobs/data")
    ingot.convert("snapshot/in.onnx", "out.safetensors")
    numpy.testing.assert_array_equal(load_file("out.safetensors")["w"], WEIGHT)


@pytest.mark.parametrize("outside", [False, True])
def test_convert_reads_initializers_of_onnx(outside: bool) -> None:
    inner = helper.make_graph([], "inner", [], [], [numpy_helper.from_array(WEIGHT[:1], "w")])
    tensors = [
        numpy_helper.from_array(WEIGHT, "w"),
        numpy_helper.from_array(numpy.ones(3, ml_dtypes.bfloat16), "half"),
        helper.make_tensor("list", onnx.TensorProto.INT64, [2], [1, 2]),
        helper.make_tensor("text", onnx.TensorProto.STRING, [1], [b"a"]),
    ]
    made = model(*tensors, nodes=(helper.make_node("If", ["w"], ["z"], "branch", then_branch=inner),))
    onnx.save(made, "in.onnx", save_as_external_data=outside, location="data.bin", size_threshold=0)
    report = ingot.convert("in.onnx", "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["w"], WEIGHT)
    numpy.testing.assert_array_equal(found["branch.then_branch.w"], WEIGHT[:1])
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["list"].tolist() == [1, 2]
    assert [one.name for one in report.left_out] == ["text"]


@pytest.mark.parametrize(
    ("location", "more", "code"),
    [
        ("../data.bin", {}, "outside"),
        ("/etc/passwd", {}, "outside"),
        ("sub\\data.bin", {}, "outside"),
        ("gone.bin", {}, "missing-file"),
        ("data.bin", {"offset": 1}, "truncated"),
        ("data.bin", {"offset": -8}, "truncated"),
        ("data.bin", {"length": 5}, "size-mismatch"),
    ],
)
def test_convert_keeps_onnx_data_in_its_folder(location: str, more: dict[str, int], code: str) -> None:
    made = model(numpy_helper.from_array(WEIGHT, "w"))
    onnx.save(made, "in.onnx", save_as_external_data=True, location="data.bin", size_threshold=0)
    made = onnx.load("in.onnx", load_external_data=False)
    pairs = made.graph.initializer[0].external_data
    for pair in pairs:
        if pair.key == "location":
            pair.value = location
    for key, value in more.items():
        kept = [pair for pair in pairs if pair.key != key]
        del pairs[:]
        pairs.extend([*kept, onnx.StringStringEntryProto(key=key, value=str(value))])
    Path("in.onnx").write_bytes(made.SerializeToString())
    with raises(ingot.ConversionError, r"tensor `w`|`w` ", code=code):
        ingot.convert("in.onnx", "out.safetensors")


def test_convert_limits_repeated_onnx_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert.limits, "ALWAYS_NBYTES", 1 << 20)
    tensors = [numpy_helper.from_array(WEIGHT, f"w{number}") for number in range(2000)]
    for tensor in tensors:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="data.bin")
    Path("data.bin").write_bytes(WEIGHT.tobytes())
    Path("in.onnx").write_bytes(model(*tensors).SerializeToString())
    monkeypatch.setattr(_convert.limits, "GROWTH", 2)
    with pytest.raises(ingot.ConversionError, match="limit is 1,048,576"):
        ingot.convert("in.onnx", "out.safetensors")


# --- GGUF ---


def gguf_file(**more: int) -> str:
    writer = gguf.GGUFWriter("in.gguf", "llama")
    writer.add_string("general.name", "x")
    writer.add_array("tokens", ["a", "b"])
    writer.add_array("scores", [1.0, 2.0])
    writer.add_bool("flag", True)
    writer.add_tensor("plain", WEIGHT)
    writer.add_tensor("half", WEIGHT.astype(numpy.float16))
    for name, kind in more.items():
        writer.add_tensor(name, gguf.quantize(WEIGHT, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "in.gguf"


def test_convert_reads_plain_tensors_and_metadata_of_gguf() -> None:
    report = ingot.convert(gguf_file(), "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["plain"], WEIGHT)
    numpy.testing.assert_array_equal(found["half"], WEIGHT.astype(numpy.float16))
    assert ingot.inspect("out.safetensors").metadata == {
        "flag": "true",
        "general.architecture": "llama",
        "general.name": "x",
    }
    assert {one.name for one in report.left_out} == {"tokens", "scores"}


def test_convert_rejects_quantised_gguf_unless_dequantizing() -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = gguf_file(packed=kind)
    with raises(ingot.ConversionError, r"tensor `packed`: quantised as Q8_0.*dtype='F32'", code="quantized"):
        ingot.convert(path, "out.safetensors")
    assert ingot.convert(path, "plain.safetensors", drop="packed").tensors == 2
    ingot.convert(path, "out.safetensors", dtype="F32")
    expected = gguf.dequantize(gguf.quantize(WEIGHT, kind), kind)
    numpy.testing.assert_array_equal(load_file("out.safetensors")["packed"], expected)


def test_convert_survives_every_cut_and_changed_number_of_gguf() -> None:
    data = bytearray(Path(gguf_file()).read_bytes())
    for end in range(0, len(data) - 32, 29):
        Path("cut.gguf").write_bytes(data[:end])
        with pytest.raises(ingot.ConversionError, match=r"^cut.gguf: "):
            ingot.convert("cut.gguf", "out.safetensors")
    refused: list[str] = []
    for place in range(4, 400, 4):
        for value in (b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 62)):
            changed = bytearray(data)
            changed[place : place + 8] = value
            Path("changed.gguf").write_bytes(changed)
            try:
                ingot.convert("changed.gguf", "out.safetensors", overwrite=True, verify=False)
            except ingot.ConversionError as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert all("changed.gguf" in words for words in refused)


def test_convert_rejects_a_shape_that_no_array_has() -> None:
    data = Path(gguf_file()).read_bytes()
    rows, columns = (size.to_bytes(8, "little") for size in WEIGHT.shape)
    assert data.count(columns + rows) == 2
    changed = data.replace(columns + rows, (1 << 62).to_bytes(8, "little") + bytes(8))
    # Cut off the values: both tensors are empty after this change.
    Path("changed.gguf").write_bytes(changed[: -WEIGHT.nbytes // 2])
    with raises(ingot.ConversionError, r"changed.gguf: tensor `plain`: .*overflows", code="size-overflow"):
        ingot.convert("changed.gguf", "out.safetensors")
    assert sorted(os.listdir()) == ["changed.gguf", "in.gguf"]


def reserved_in_npz() -> str:
    numpy.savez("in.npz", __metadata__=WEIGHT, a=WEIGHT)
    return "in.npz"


def reserved_in_hdf5() -> str:
    with h5py.File("in.h5", "w") as file:
        file["__metadata__"], file["a"] = WEIGHT, WEIGHT
    return "in.h5"


@pytest.mark.parametrize("write", [reserved_in_npz, reserved_in_hdf5])
@pytest.mark.parametrize("to", ["out.safetensors", "out.bt", "out/"])
def test_convert_names_the_entry_of_a_reserved_name(write: Callable[[], str], to: str) -> None:
    path = write()
    with pytest.raises(ingot.ConversionError, match=rf"^{path}: tensor `__metadata__`: .*reserved") as caught:
        ingot.convert(path, to)
    assert (caught.value.code, caught.value.tensor) == ("reserved-name", "__metadata__")
    assert os.listdir() == [path]
    ingot.convert(path, to, drop="__metadata__")
    ingot.convert(path, "out.npz")
    assert set(numpy.load("out.npz").files) == {"__metadata__", "a"}


def test_convert_names_the_entry_of_an_odd_number_of_nibbles() -> None:
    kind = onnx.TensorProto.FLOAT4E2M1
    tensors = [onnx.helper.make_tensor(f"t{size}", kind, [size], [1.0] * size) for size in (3, 4)]
    graph = onnx.helper.make_graph([], "g", [], [], initializer=tensors)
    onnx.save(onnx.helper.make_model(graph), "in.onnx")
    with pytest.raises(ingot.ConversionError, match=r"^in.onnx: tensor `t3`: shape \[3\] of F4") as caught:
        ingot.convert("in.onnx", "out.safetensors")
    assert (caught.value.code, caught.value.tensor) == ("partial-byte", "t3")
    assert ingot.convert("in.onnx", "out.safetensors", drop="t3").tensors == 1


def test_convert_names_the_entry_of_an_unknown_gguf_type() -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter("in.gguf", "llama")
    writer.add_tensor("a", WEIGHT)
    writer.add_tensor("q", numpy.zeros((2, block_nbytes), numpy.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ingot.ConversionError, match=r"^in.gguf: tensor `q`: quantised as Q8_K") as caught:
        ingot.convert("in.gguf", "out.safetensors", dtype="F32")
    assert (caught.value.code, caught.value.tensor) == ("unsupported-dtype", "q")
    assert ingot.convert("in.gguf", "out.safetensors", dtype="F32", drop="q").tensors == 1
    assert block == 256


def test_convert_keys_and_drop_may_name_entries_left_out() -> None:
    torch.save({"model": {"w": torch.ones(2), "step": 5}, "epoch": 3}, "in.pt")
    for options in ({"drop": ["epoch"]}, {"drop": ["epoch", "model.step"]}, {"drop": "e*"}):
        report = ingot.convert("in.pt", "out.safetensors", overwrite=True, **options)
        assert (report.tensors, report.dropped) == (1, ())
        assert {one.name for one in report.left_out} == {"epoch", "model.step"}
    assert ingot.convert("in.pt", "out.safetensors", overwrite=True, root="model", drop="step").tensors == 1
    with pytest.raises(ingot.ConversionError, match=r"no tensor in it is selected"):
        ingot.convert("in.pt", "out.safetensors", overwrite=True, keys="epoch")
    with pytest.raises(ingot.TensorNotFoundError):
        ingot.convert("in.pt", "out.safetensors", overwrite=True, root="model", drop="epoch")


def gguf_parts(count: int, total: int | None = None) -> dict[str, numpy.ndarray[Any, Any]]:
    tensors = {f"blk.{number}.w": WEIGHT + number for number in range(count)}
    for number, (name, tensor) in enumerate(tensors.items()):
        writer = gguf.GGUFWriter(f"m-{number + 1:05}-of-{count:05}.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total or count)
        writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tensors


@pytest.mark.parametrize("path", ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "."])
def test_convert_reads_all_parts_of_a_gguf(path: str) -> None:
    tensors = gguf_parts(3)
    Path("README.md").write_text("x")
    ingot.convert(path, "out.safetensors")
    found = load_file("out.safetensors")
    assert found.keys() == tensors.keys()
    assert all(numpy.array_equal(found[name], tensor) for name, tensor in tensors.items())
    assert ingot.inspect("out.safetensors").metadata == {"general.architecture": "llama"}


def test_convert_rejects_some_parts_of_a_gguf() -> None:
    gguf_parts(3)
    os.rename("m-00003-of-00003.gguf", "away.gguf")
    for path in ("m-00001-of-00003.gguf", "away.gguf"):
        with pytest.raises(ingot.ConversionError, match="part"):
            ingot.convert(path, "out.safetensors")
    assert [one.name for one in listed("m-00001-of-00003.gguf").tensors] == ["blk.0.w"]
    os.rename("away.gguf", "m-00003-of-00003.gguf")
    os.replace("m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
    gguf_parts(2, total=5)
    os.rename("m-00001-of-00002.gguf", "m-00002-of-00003.gguf")
    for path in ("m-00001-of-00003.gguf", "m-00002-of-00002.gguf"):
        with pytest.raises(ingot.ConversionError, match="part") as caught:
            ingot.convert(path, "out.safetensors")
        assert caught.value.code in ("part", "missing-file")


def test_convert_names_a_tensor_of_gguf_once() -> None:
    with pytest.raises(ingot.ConversionError) as caught:
        ingot.convert(gguf_file(packed=gguf.GGMLQuantizationType.Q8_0), "out.safetensors")
    assert str(caught.value).count("packed") == 1


# --- Arrow and Parquet ---


def table() -> pa.Table:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(WEIGHT.reshape(-1)), 64)
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [8, 8]), rows)
    nested = pa.FixedSizeListArray.from_arrays(rows, 2)
    return pa.table(
        {
            "tensors": tensors,
            "rows": rows,
            "a.b": pa.array([1, 2, 3, 4]),
            "bool": pa.array([True, False, True, True]),
            "half": pa.array(numpy.ones(4, numpy.float16)),
            "text": pa.array(list("abcd")),
            "nested": pa.FixedSizeListArray.from_arrays(pa.concat_arrays([nested, nested]), 1),
        }
    )


def write_file(path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table().slice(0, 1))
        writer.write_table(table().slice(1))


def write_stream(path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table())


def write_packed(path: str) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table().schema, options=options) as writer:
        writer.write_table(table())


def write_parquet(path: str) -> None:
    pyarrow.parquet.write_table(table(), path, row_group_size=3)


@pytest.mark.parametrize("write", [write_file, write_stream, write_packed, write_parquet])
def test_convert_reads_columns_of_numbers(write: Callable[[str], None]) -> None:
    write("in.data")
    report = ingot.convert("in.data", "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["tensors"], WEIGHT.reshape(4, 8, 8))
    numpy.testing.assert_array_equal(found["rows"], WEIGHT)
    numpy.testing.assert_array_equal(found["nested"], numpy.tile(WEIGHT, (2, 1)).reshape(4, 1, 2, 64))
    assert found["a.b"].tolist() == [1, 2, 3, 4]
    assert found["bool"].tolist() == [True, False, True, True]
    assert found["half"].dtype == numpy.float16
    assert [one.name for one in report.left_out] == ["text"]


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_convert_rejects_a_column_with_missing_values(ending: str) -> None:
    holes = pa.table({"a": pa.array([1, None, 3]), "b": pa.array([1, 2, 3])})
    if ending == "parquet":
        pyarrow.parquet.write_table(holes, "in.parquet")
    else:
        with pa.OSFile("in.arrow", "wb") as sink, pa.ipc.new_file(sink, holes.schema) as writer:
            writer.write_table(holes)
    with pytest.raises(ingot.ConversionError, match="tensor `a`: 1 values of the column are missing"):
        ingot.convert(f"in.{ending}", "out.safetensors")
    assert ingot.convert(f"in.{ending}", "out.safetensors", drop="a").tensors == 1


# --- all of them ---


WRITERS: dict[str, Callable[[str], Any]] = {
    "hdf5": lambda path: h5py.File(path, "w").create_dataset("a", data=WEIGHT).file.close(),
    "onnx": lambda path: onnx.save(model(numpy_helper.from_array(WEIGHT, "w")), path),
    "arrow": write_file,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("word", ["hdf5", "user block", "stream", "arrow", "parquet", "gguf"])
def test_convert_rejects_bytes_after_the_first_file(word: str) -> None:
    if word == "user block":
        with h5py.File("in.data", "w", userblock_size=512) as file:
            file["a"] = WEIGHT
    elif word == "gguf":
        os.rename(gguf_file(), "in.data")
    else:
        (WRITERS | {"stream": write_stream})[word]("in.data")
    data = Path("in.data").read_bytes()
    ingot.convert("in.data", "out.safetensors")
    for more in (data, b"more and more and more"):
        Path("two.data").write_bytes(data + more)
        with pytest.raises(ingot.ConversionError, match=r"^two.data: "):
            ingot.convert("two.data", "two.safetensors")


@pytest.mark.parametrize("word", WRITERS)
def test_convert_names_a_truncated_file(word: str) -> None:
    WRITERS[word]("in.data")
    data = Path("in.data").read_bytes()
    for end in (9, len(data) // 3, len(data) - 9):
        Path("cut.data").write_bytes(data[:end])
        with pytest.raises(ingot.ConversionError, match=r"^cut.data: "):
            ingot.convert("cut.data", "out.safetensors", source_format=word)


@pytest.mark.parametrize(
    ("word", "package"), [("hdf5", "h5py"), ("onnx", "onnx"), ("arrow", "pyarrow"), ("parquet", "pyarrow")]
)
def test_convert_names_a_missing_package(word: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[word]("in.data")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs {package}.*pip install 'ingot-tensors\[convert\]'"
    ) as caught:
        ingot.convert("in.data", "out.safetensors", source_format=word)
    assert caught.value.name == package
