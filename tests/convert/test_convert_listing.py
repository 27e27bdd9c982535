"""`ingot ls` of files of other formats, compared with the conversion, and the bytes that it reads."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import h5py
import msgpack
import numpy
import onnx
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint as dcp
from onnx import numpy_helper

import ingot
from ingot import _convert
from ingot._convert import listed
from ingot._convert.formats import FORMATS
from support import processes

from .conftest import Payload
from .test_convert_libraries import gguf_file, model
from .test_convert_msgpack import packed_array
from .test_convert_torch import repacked, saved

Array = numpy.ndarray[Any, Any]


def as_torch(weight: Array) -> str:
    state = {"model": {"w": torch.from_numpy(weight), "row": torch.from_numpy(weight)[0]}, "step": 5}
    return saved(state, "in.pt")


def as_packed_torch(weight: Array) -> str:
    return repacked(as_torch(weight), "packed.pt", zipfile.ZIP_DEFLATED)


def as_old_torch(weight: Array) -> str:
    return saved({"w": torch.from_numpy(weight), "step": 5}, "old.bin", legacy=True)


def as_sharded_torch(weight: Array) -> str:
    saved({"w": torch.from_numpy(weight)}, "one.bin")
    saved({"half": torch.ones(2, dtype=torch.float16)}, "two.bin", legacy=True)
    index = {
        "weight_map": {"w": "one.bin", "half": "two.bin"},
        "metadata": {"total_size": 4, "made": "by hand"},
    }
    Path("pytorch_model.bin.index.json").write_text(json.dumps(index))
    return "pytorch_model.bin.index.json"


def as_distributed(weight: Array) -> str:
    with warnings.catch_warnings():
        # torch warns of each save without a process group.
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.from_numpy(weight), "step": 5}, checkpoint_id="step_1", no_dist=True)
    return "step_1/.metadata"


def as_npz(weight: Array) -> str:
    numpy.savez("in.npz", w=weight, text=numpy.array(["a"]))
    return "in.npz"


def as_packed_npz(weight: Array) -> str:
    numpy.savez_compressed("packed.npz", w=weight, flags=numpy.array([True, False]))
    return "packed.npz"


def as_npy(weight: Array) -> str:
    numpy.save("in.npy", weight)
    return "in.npy"


def as_hdf5(weight: Array) -> str:
    with h5py.File("in.h5", "w") as file:
        file.create_dataset("dense/kernel", data=weight, compression="gzip", shuffle=True)
        file["dense/plain"] = weight
        file["text"] = "hello"
    return "in.h5"


def as_keras(weight: Array) -> str:
    with zipfile.ZipFile("in.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(as_hdf5(weight), "model.weights.h5")
    return "in.keras"


def as_flax(weight: Array) -> str:
    tree = {"params": {"kernel": packed_array(weight)}, "step": 5}
    Path("in.msgpack").write_bytes(msgpack.packb(tree, use_bin_type=True))
    return "in.msgpack"


def as_onnx(weight: Array) -> str:
    inner = onnx.helper.make_graph([], "inner", [], [], [numpy_helper.from_array(weight[:1], "w")])
    branch = onnx.helper.make_node("If", ["w"], ["z"], "branch", then_branch=inner)
    tensors = [
        numpy_helper.from_array(weight, "w"),
        onnx.helper.make_tensor("list", onnx.TensorProto.INT64, [2], [1, 2]),
        onnx.helper.make_tensor("text", onnx.TensorProto.STRING, [1], [b"a"]),
    ]
    onnx.save(model(*tensors, nodes=(branch,)), "in.onnx")
    return "in.onnx"


def as_onnx_with_data(weight: Array) -> str:
    made = model(numpy_helper.from_array(weight, "w"))
    # `onnx.save` would append to an existing file.
    Path("data.bin").unlink(missing_ok=True)
    onnx.save(made, "beside.onnx", save_as_external_data=True, location="data.bin", size_threshold=0)
    return "beside.onnx"


def as_paddle(weight: Array) -> str:
    Path("in.pdparams").write_bytes(pickle.dumps({"w": weight, "epoch": 3}, 4))
    return "in.pdparams"


def as_pickle(weight: Array) -> str:
    Path("in.pkl").write_bytes(pickle.dumps({"w": weight, "epoch": 3}, 5))
    return "in.pkl"


def as_gguf(weight: Array) -> str:
    writer = gguf.GGUFWriter("in.gguf", "llama")
    writer.add_array("tokens", ["a", "b"])
    writer.add_tensor("w", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "in.gguf"


def columns(weight: Array) -> pa.Table:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(weight.reshape(-1)), weight.shape[1])
    return pa.table({"rows": rows, "number": numpy.arange(len(weight)), "text": ["a"] * len(weight)})


def as_arrow(weight: Array) -> str:
    table = columns(weight)
    with pa.OSFile("in.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return "in.arrow"


def as_packed_arrows(weight: Array) -> str:
    table = columns(weight)
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile("in.arrows", "wb") as sink,
        pa.ipc.new_stream(sink, table.schema, options=packed) as writer,
    ):
        writer.write_table(table)
    return "in.arrows"


def as_parquet(weight: Array) -> str:
    pyarrow.parquet.write_table(columns(weight), "in.parquet")
    return "in.parquet"


MAKERS: tuple[Callable[[Array], str], ...] = (
    as_torch,
    as_packed_torch,
    as_old_torch,
    as_sharded_torch,
    as_distributed,
    as_npz,
    as_packed_npz,
    as_npy,
    as_hdf5,
    as_keras,
    as_flax,
    as_onnx,
    as_onnx_with_data,
    as_paddle,
    as_pickle,
    as_gguf,
    as_arrow,
    as_packed_arrows,
    as_parquet,
)
# The formats of this package, which the command opens itself, and formats that only their framework writes:
# their listing is tested beside their conversion.
ELSEWHERE = {"safetensors", "bintensors", "tensorflow", "savedmodel"}
SMALL = numpy.arange(1024, dtype=numpy.float32).reshape(64, 16)
# 32 MiB that compress badly.
LARGE = numpy.random.default_rng(0).integers(0, 1 << 30, (1024, 8192), numpy.uint32).view(numpy.float32)


def test_formats_all_have_a_listing_test() -> None:
    assert {listed(make(SMALL)).format for make in MAKERS} == set(FORMATS) - ELSEWHERE


@pytest.mark.parametrize("make", MAKERS)
def test_ls_lists_what_convert_writes(make: Callable[[Array], str]) -> None:
    path = make(SMALL)
    listing = listed(path)
    done = ingot.convert(path, "out.safetensors")
    with ingot.safe_open("out.safetensors", "np") as file:
        written = {name: file.info(name) for name in file}
    found = {tensor.name: tensor for tensor in listing.tensors if tensor.name not in done.shared}
    assert found.keys() == written.keys()
    for name, info in written.items():
        assert (found[name].dtype, found[name].shape, found[name].nbytes) == (
            info.dtype,
            info.shape,
            info.nbytes,
        )
    assert listing.format == done.source_format
    assert [one for one in done.left_out if one.kind != "metadata"] == list(listing.left_out)


def bytes_read_by(work: Callable[[], object]) -> int:
    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = rchar()
    work()
    return rchar() - before


@pytest.mark.parametrize("make", MAKERS)
def test_ls_reads_little_of_a_large_file(make: Callable[[Array], str]) -> None:
    # The first call also imports modules.
    listed(make(SMALL))
    path = make(SMALL)
    small = bytes_read_by(lambda: listed(path))
    path = make(LARGE)
    large = bytes_read_by(lambda: listed(path))
    assert large - small < 256 << 10


MAPPED = """
listing = ingot._convert.listed(sys.argv[1])
gc.collect()
forget_peak()
before = memory("VmRSS")
ingot._convert.listed(sys.argv[1])
say([memory("VmHWM") - before, [list(tensor.shape) for tensor in listing.tensors]])
"""


def test_ls_reads_no_mapped_column() -> None:
    ended = processes.run("import ingot._convert\n" + MAPPED, as_arrow(LARGE), folder=Path.cwd())
    grown, shapes = ended.said()
    assert shapes == [[1024, 8192], [1024]]
    assert grown < 8 << 20


def test_ls_lists_quantised_tensors_as_stored() -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    listing = listed(gguf_file(packed=kind))
    packed = listing.tensors[-1]
    assert (packed.dtype, packed.shape) == ("Q8_0", (4, 64))
    # 32 values of a byte each, and their scale in two.
    assert packed.nbytes == 4 * 64 // 32 * 34


def test_ls_lists_an_unconvertible_tensor_with_its_dtype() -> None:
    wide = torch.ones(2, dtype=torch.complex128)
    listing = listed(saved({"a": torch.ones(2), "wide": wide}, "in.pt"))
    assert [(one.name, one.dtype, one.shape) for one in listing.tensors] == [
        ("a", "F32", (2,)),
        ("wide", "complex128", None),
    ]


def test_ls_names_the_file_of_each_tensor() -> None:
    listing = listed(as_sharded_torch(SMALL))
    assert {one.name: Path(one.file).name for one in listing.tensors} == {"w": "one.bin", "half": "two.bin"}
    assert [Path(file).name for file in listing.files] == [
        "pytorch_model.bin.index.json",
        "one.bin",
        "two.bin",
    ]
    listing = listed(as_onnx_with_data(SMALL))
    assert [Path(file).name for file in listing.files] == ["beside.onnx", "data.bin"]


@pytest.mark.parametrize("legacy", [False, True])
def test_ls_rejects_a_pickle_with_a_payload(legacy: bool, payload: Payload) -> None:
    with pytest.raises(ingot.ConversionError, match="is not run") as caught:
        listed(saved({"a": torch.ones(2), "b": payload}, "in.bin", legacy=legacy))
    assert caught.value.code == "unsafe-pickle"


def test_ls_rejects_a_paddle_file_with_a_payload(payload: Payload) -> None:
    Path("in.pdparams").write_bytes(pickle.dumps({"a": SMALL, "b": payload}, 4))
    with pytest.raises(ingot.ConversionError, match="refers to more than arrays"):
        listed("in.pdparams")


@pytest.mark.parametrize("make", MAKERS)
def test_ls_lists_or_rejects_a_truncated_file(make: Callable[[Array], str]) -> None:
    path = Path(make(SMALL))
    data = path.read_bytes()
    step = max(len(data) // 40, 1)
    said = [refusal(path, data[:end]) for end in range(0, len(data), step)]
    refusals = [words for words in said if words]
    assert refusals
    assert all(path.name in words for words in refusals)


def test_ls_survives_a_changed_byte_of_onnx() -> None:
    path = Path(as_onnx(SMALL))
    data = path.read_bytes()
    said = []
    for place in range(0, 400, 3):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        said.append(refusal(path, changed))
    refusals = [words for words in said if words]
    assert 10 < len(refusals) < len(said)
    assert all("in.onnx: " in words for words in refusals)


def refusal(path: Path, data: bytes) -> str:
    """Return the error for a file with this content, or nothing if it is listed."""
    path.write_bytes(data)
    try:
        listed(str(path))
    except ingot.SafetensorError as error:
        return str(error)
    return ""


def test_ls_rejects_an_onnx_length_past_its_message() -> None:
    # The graph has one byte, the tag of a number. The bytes of the number are after the end of the graph.
    Path("in.onnx").write_bytes(b"\x08\x08" + length_of(0x3A, b"\x08") + b"\x01")
    with pytest.raises(ingot.ConversionError, match="passes the end of its message"):
        listed("in.onnx")


def test_ls_limits_nested_onnx_messages() -> None:
    inner = b""
    for _ in range(20_000):
        # An attribute with a graph, in a node, in a graph.
        inner = length_of(0x32, inner)
        inner = length_of(0x2A, inner)
        inner = length_of(0x0A, inner)
        if len(inner) > 60_000:
            break
    Path("in.onnx").write_bytes(b"\x08\x08" + length_of(0x3A, inner))
    with pytest.raises(ingot.ConversionError, match="too deep"):
        listed("in.onnx")


def length_of(tag: int, body: bytes) -> bytes:
    return bytes([tag]) + _convert.sources.onnx._encoded(len(body)) + body
