"""Conversion of pickles of every protocol and writer: only bytes of the file become tensors."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import pickletools
import struct
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import ingot
from ingot._convert import limits
from ingot._convert.source import Stream
from ingot.numpy import load_file
from support import processes
from support.errors import raises

ARRAYS: dict[str, Any] = {
    "fortran": numpy.asfortranarray(numpy.arange(6, dtype="f4").reshape(2, 3)),
    "big": numpy.arange(3, dtype=">i4"),
    "bool": numpy.array([True, False]),
    "complex": numpy.array([1 + 2j], "c8"),
    "scalar": numpy.float32(2.5),
    "uint16": numpy.array([1, 50256, 65535], "u2"),
    "empty": numpy.zeros((0, 2), "i8"),
    "half": numpy.arange(8).astype(ml_dtypes.bfloat16),
    "long": numpy.arange(70_000, dtype="u4").astype("u1"),
    "é": numpy.ones(2),
}


def same(found: Any, expected: Any) -> bool:
    expected = numpy.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return bool(
        found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()
    )


# Written by Python 2.7 and NumPy 1.16: `pickle.dump({"w": array([[1, 2, -3]], "f4")}, file)`.
PYTHON_2 = (
    b"(dp0\nS'w'\np1\ncnumpy.core.multiarray\n_reconstruct\np2\n(cnumpy\nndarray\np3\n(I0\ntp4\nS'b'\np5\n"
    b"tp6\nRp7\n(I1\n(I1\nI3\ntp8\ncnumpy\ndtype\np9\n(S'f4'\np10\nI0\nI1\ntp11\nRp12\n(I3\nS'<'\np13\nNNNI-1\n"
    b"I-1\nI0\ntp14\nbI00\nS'\\x00\\x00\\x80?\\x00\\x00\\x00@\\x00\\x00@\\xc0'\np15\ntp16\nbs."
)


def as_python_2(data: bytes) -> bytes:
    """Return a pickle whose strings are those of Python 2: bytes in UTF-8."""
    out = b""
    operations = list(pickletools.genops(data))
    ends = [position or 0 for _, _, position in operations[1:]] + [len(data)]
    for (code, argument, position), end in zip(operations, ends, strict=True):
        if code.name == "BINUNICODE":
            text = str(argument).encode()
            length = bytes([len(text)]) if len(text) < 256 else struct.pack("<I", len(text))
            out += (b"U" if len(text) < 256 else b"T") + length + text
        else:
            out += data[position or 0 : end].replace(b"numpy._core", b"numpy.core")
    return out


def test_convert_reads_arrays_of_python_2() -> None:
    Path("in.pkl").write_bytes(PYTHON_2)
    ingot.convert("in.pkl", "out.safetensors")
    assert load_file("out.safetensors")["w"].tolist() == [[1.0, 2.0, -3.0]]
    Path("in.pkl").write_bytes(as_python_2(pickle.dumps(ARRAYS, 2)))
    ingot.convert("in.pkl", "out.safetensors", overwrite=True)
    found = load_file("out.safetensors")
    assert all(same(found[name], array) for name, array in ARRAYS.items())


@pytest.mark.parametrize("root", [None, "state_dict"])
def test_convert_reads_torch_files_of_python_2(root: str | None) -> None:
    tree: Any = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([7, 8])}
    buffer = io.BytesIO()
    state = tree if root is None else {root: tree, "epoch": 3}
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    file, out = io.BytesIO(buffer.getvalue()), b""
    for _ in range(5):
        begin = file.tell()
        list(pickletools.genops(file))
        out += as_python_2(buffer.getvalue()[begin : file.tell()])
    Path("old.pth").write_bytes(out + buffer.getvalue()[file.tell() :])
    assert torch.load("old.pth", weights_only=True)
    ingot.convert("old.pth", "out.safetensors", root=root)
    found = load_file("out.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {
        "w": [[0, 1, 2], [3, 4, 5]],
        "b": [7, 8],
    }


def test_convert_reads_uint16_as_bfloat16_only_with_a_paddle_mark() -> None:
    Path("in.pdparams").write_bytes(pickle.dumps({"tokens": numpy.array([1, 65535], "u2")}, 4))
    with raises(ingot.ConversionError, r"tensor `tokens`: uint16 without Paddle", code="unclear-dtype"):
        ingot.convert("in.pdparams", "out.safetensors")
    for word, code in (("pickle", "U16"), ("paddle", "BF16")):
        ingot.convert("in.pdparams", "out.safetensors", source_format=word, overwrite=True)
        with ingot.safe_open("out.safetensors", "np") as file:
            assert file.info("tokens").dtype == code


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "per_tensor": torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8),
        "per_channel": torch.quantize_per_channel(
            torch.ones(3, 4), torch.ones(3), torch.zeros(3), 0, torch.qint8
        ),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "complex128": torch.ones(2, dtype=torch.complex128),
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_convert_drops_a_tensor_that_no_file_can_hold(legacy: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = {name: {"w": torch.arange(3.0), "odd": odd} for name, odd in odd_tensors().items()}
    for name, state in states.items():
        torch.save(state, "in.pt", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ingot.ConversionError, match="tensor `odd`"):
            ingot.convert("in.pt", f"{name}.safetensors")
        ingot.convert("in.pt", f"{name}.safetensors", drop=["odd"])
        assert load_file(f"{name}.safetensors")["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", [(0, 1), None, 1.5, b"x", frozenset({1})], ids=lambda key: type(key).__name__)
def test_convert_reports_odd_keys_of_selected_tensors_only(key: Any) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "cache": {key: torch.ones(2)}}, "in.pt")
    ingot.convert("in.pt", "out.safetensors", root="state_dict")
    ingot.convert("in.pt", "out.safetensors", overwrite=True, keys="state_dict.w")
    ingot.convert("in.pt", "out.safetensors", overwrite=True, drop="cache.*")
    with raises(ingot.ConversionError, "a key at `cache`", code="key"):
        ingot.convert("in.pt", "out.safetensors", overwrite=True)


class Callback:
    """An object of a trainer, which refers to another object, and that one to it."""

    def __init__(self, *values: Any) -> None:
        self.values, self.inner = values, {"of": self, "path": Path("best.ckpt")}


class Config(dict[str, Any]):
    """A dict of a class that the reader does not know, with attributes."""


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("legacy", [False, True])
def test_convert_leaves_out_objects_of_unknown_classes(legacy: bool, protocol: int) -> None:
    config = Config(lr=0.1, betas=[0.9, 0.99])
    config.parent = config  # type: ignore[attr-defined]
    weight = torch.arange(6.0)
    tree = {
        "state_dict": {"model.w": weight},
        "callbacks": {
            Callback: {"best_model_score": torch.tensor(0.5)},
            "last": Callback(1, torch.tensor(2)),
        },
        "callback": Callback(numpy.float64(3), {"a", "b"}),
        "hyper_parameters": config,
        "date": datetime.datetime(2022, 8, 10, tzinfo=datetime.UTC),
        "kind": zipfile.ZipInfo,
    }
    torch.save(tree, "sd.ckpt", pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    report = ingot.convert("sd.ckpt", "out.safetensors")
    found = ingot.torch.load_file("out.safetensors")
    key = f"callbacks.{Callback.__module__}.Callback.best_model_score"
    assert found.keys() == {"state_dict.model.w", key}
    assert torch.equal(found["state_dict.model.w"], weight)
    assert {(one.name, one.kind, one.value.rpartition(".")[2]) for one in report.left_out} == {
        ("callbacks.last", "object", "Callback"),
        ("callback", "object", "Callback"),
        ("hyper_parameters", "object", "Config"),
        ("date", "object", "datetime"),
        ("kind", "class", "ZipInfo"),
    }
    assert ingot.convert("sd.ckpt", "model.safetensors", root="state_dict").tensors == 1


def test_convert_names_an_object_that_contains_tensors() -> None:
    torch.save({"w": torch.ones(2), "callback": Callback({"ema": torch.ones(3)})}, "in.pt")
    with raises(ingot.ConversionError, r"tensor `callback`: .*not run.*Callback", code="unsafe-pickle"):
        ingot.convert("in.pt", "out.safetensors")
    assert ingot.convert("in.pt", "out.safetensors", drop="callback").dropped == ("callback",)


@pytest.mark.parametrize("call", [os.getcwd, eval, Path.cwd, subprocess.Popen, torch.load])
def test_convert_names_a_function_that_could_run_a_program(call: Any) -> None:
    torch.save({"w": torch.ones(2), "call": call}, "in.pt")
    if call == Path.cwd:
        # A method is an attribute that the builtin `getattr` returns.
        call = getattr
    words = f"not run: `.*{call.__name__}`"
    with raises(ingot.ConversionError, words, code="unsafe-pickle", tensor="call"):
        ingot.convert("in.pt", "out.safetensors")


def test_convert_bounds_the_search_through_objects() -> None:
    """Objects that refer to all earlier ones are visited once each."""
    objects: list[Any] = []
    for _ in range(400):
        objects.append(Callback(*objects))
    torch.save({"w": torch.ones(2), **{f"o{at}": one for at, one in enumerate(objects)}}, "in.pt")
    assert len(ingot.convert("in.pt", "out.safetensors").left_out) == 400


def test_convert_reports_two_tensors_of_one_name_if_selected() -> None:
    torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(1), "w": torch.ones(3)}, "in.pt")
    ingot.convert("in.pt", "out.safetensors", keys="w")
    assert load_file("out.safetensors").keys() == {"w"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_convert_reads_what_checkpoints_hold_beside_tensors(protocol: int) -> None:
    weight = torch.arange(6.0)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.tag = "x"  # type: ignore[attr-defined]
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    others = {"dtype": torch.float16, "device": torch.device("cpu"), "size": torch.Size([2]), "c": 1 + 2j}
    tree = {
        "ü": {"0": parameter},
        "last": last,
        "cut": last[1:, 1:, ::2],
        "wide": torch.tensor([2**64 - 1], dtype=torch.uint64),
        "others": others,
        "set": {1, 2},
        "bytes": b"abc",
        "array": bytearray(b"abc"),
        "big": 2**200,
        "storage": weight.untyped_storage(),
        "numbers": numpy.ones(2),
    }
    torch.save(tree, "in.pt", pickle_protocol=protocol)
    report = ingot.convert("in.pt", "out.safetensors")
    found = ingot.torch.load_file("out.safetensors")
    assert found.keys() == {"ü.0", "last", "cut", "wide", "numbers"}
    assert torch.equal(found["ü.0"], weight)
    assert torch.equal(found["last"], last)
    assert torch.equal(found["cut"], last[1:, 1:, ::2])
    assert found["wide"].tolist() == [2**64 - 1]
    assert {one.name for one in report.left_out} == {"others", "set", "bytes", "array", "big", "storage"}


def test_convert_reads_torch_files_without_checksums() -> None:
    tree = {"a": torch.arange(6.0), "b": torch.ones(40_000)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, "in.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    ingot.convert("in.pt", "out.safetensors")
    found = ingot.torch.load_file("out.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tree.items())


def torch_twice(file: Any) -> None:
    torch.save({"a": torch.ones(3)}, file)
    torch.save({"b": torch.ones(3)}, file)


def old_torch_twice(file: Any) -> None:
    torch.save({"a": torch.ones(3)}, file, _use_new_zipfile_serialization=False)
    torch.save({"b": torch.ones(3)}, file, _use_new_zipfile_serialization=False)


def pickles_twice(file: Any) -> None:
    pickle.dump({"a": numpy.ones(3)}, file)
    pickle.dump({"b": numpy.ones(3)}, file)


def pickle_and_more(file: Any) -> None:
    pickle.dump({"a": numpy.ones(3)}, file, 4)
    file.write(b"more")


def frame_and_more(file: Any) -> None:
    data = pickle.dumps({"a": numpy.ones(3)}, 4)
    length = int.from_bytes(data[3:11], "little")
    file.write(data[:3] + (length + 4).to_bytes(8, "little") + data[11:] + b"more")


def arrays_twice(file: Any) -> None:
    numpy.save(file, numpy.ones(3))
    numpy.save(file, numpy.ones(3))


RECORDS = (torch_twice, old_torch_twice, pickles_twice, pickle_and_more, frame_and_more, arrays_twice)


@pytest.mark.parametrize("write", RECORDS)
def test_convert_rejects_bytes_after_the_first_record(write: Callable[[Any], None]) -> None:
    with open("in.data", "wb") as file:
        write(file)
    with pytest.raises(ingot.ConversionError, match=r"^in.data: "):
        ingot.convert("in.data", "out.safetensors")


def test_convert_rejects_pickles_that_copy_the_top_of_the_stack() -> None:
    """No pickler writes this opcode. To execute 5 million of them would take seconds."""
    for count in (1, 5_000_000):
        Path("w.pdparams").write_bytes(b"\x80\x02N" + pickle.DUP * count + b".")
        with pytest.raises(ingot.ConversionError, match="an object that is not a tensor is refused"):
            ingot.convert("w.pdparams", "w.safetensors")
    assert not Path("w.safetensors").exists()


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in members.items():
            made.writestr(f"a/{name.replace('_', '.')}", data)
    return buffer.getvalue()


def place_of_directory(data: bytes) -> int:
    """Return the position of an archive's directory, which the record at its end states."""
    (position,) = struct.unpack_from("<L", data, data.rindex(b"PK\5\6") + 16)
    return int(position)


def shifted(inner: bytes, outer: bytes) -> bytes:
    """Return `inner` and then `outer`, whose record at the end points to the directory of `inner`.

    Some readers trust that position; others look for the directory in front of the record.
    """
    end = outer.rindex(b"PK\5\6")
    return inner + outer[: end + 16] + struct.pack("<L", place_of_directory(inner)) + outer[end + 20 :]


def moved(inner: bytes, outer: bytes) -> bytes:
    """Return `inner` and then `outer`, whose positions are corrected to count from the start of the file."""
    end, at = outer.rindex(b"PK\5\6"), place_of_directory(outer)
    data = bytearray(outer)
    struct.pack_into("<L", data, end + 16, at + len(inner))
    while data[at : at + 4] == b"PK\1\2":
        (of_member,) = struct.unpack_from("<L", data, at + 42)
        struct.pack_into("<L", data, at + 42, of_member + len(inner))
        at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
    return inner + bytes(data)


def behind(inner: bytes, outer: bytes) -> bytes:
    """Return `inner` and then `outer`, unchanged."""
    return inner + outer


def followed(inner: bytes, outer: bytes) -> bytes:
    """Return an archive that is followed by other bytes."""
    return inner + b"more"


@pytest.mark.parametrize("join", [shifted, moved, behind, followed])
def test_convert_rejects_two_archives_in_one_file(join: Callable[[bytes, bytes], bytes]) -> None:
    few = archive(data_pkl=b"\x80\x02}.", byteorder=b"little")
    many = archive(data_pkl=b"\x80\x02}.", byteorder=b"little", version=b"3")
    for inner, outer in ((few, few), (few, many), (many, few)):
        Path("in.pt").write_bytes(join(inner, outer))
        with pytest.raises(ingot.ConversionError, match=r"^in.pt: .*(directory|directories|member)"):
            ingot.convert("in.pt", "out.safetensors", source_format="torch")


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def torch_files(pickled: bytes) -> dict[str, bytes]:
    """Return the pickle as torch files: in an archive, in a compressed one, and in the older format."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in {"data.pkl": pickled, "byteorder": b"little"}.items():
            made.writestr(f"a/{name}", data)
        made.writestr("a/data/0", bytes(4096), zipfile.ZIP_DEFLATED)
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    begin = [torch.serialization.MAGIC_NUMBER, 1001, system]
    old = b"".join(pickle.dumps(one, 2) for one in begin) + pickled + pickle.dumps([], 2)
    return {"packed.pt": buffer.getvalue(), "plain.pt": archive(data_pkl=pickled), "old.pt": old}


STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0zX\3\0\0\0cpuM\xff\x0ftQ"
# Calls that `torch.load` permits, and that allocate tensors whose values are not in the file.
NOT_OF_THE_FILE = {
    "tensor": b"ctorch\nFloatTensor\n(J\xb0\x36\0\0tR",
    "object": b"ctorch\nFloatTensor\n(J\xb0\x36\0\0t\x81",
    "storage": b"ctorch\nByteStorage\n(J\xb0\x36\0\0tR",
    "class": b"ctorch\nTensor\n(J\xb0\x36\0\0tR",
    "unlisted": b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\x0a\x85K\1\x85\x89}tR",
    "meta": b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\nK\5\x85K\1\x85\x89tR",
}


@pytest.mark.parametrize("call", NOT_OF_THE_FILE)
def test_convert_makes_no_tensor_of_memory(call: str) -> None:
    for name, data in torch_files(b"\x80\x02}" + text("t") + NOT_OF_THE_FILE[call] + b"s.").items():
        Path(name).write_bytes(data)
        with pytest.raises(ingot.ConversionError, match=f"^{name}: tensor `t`: "):
            ingot.convert(name, "out.safetensors")


COUNTED = """
import ingot
for name in ("packed.pt", "plain.pt", "old.pt", "in.pkl"):
    try:
        ingot.convert(name, "out.safetensors")
    except ingot.ConversionError as error:
        assert error.code == "too-large", error
    else:
        raise AssertionError(name)
say(memory("VmHWM"))
"""


@pytest.mark.parametrize("word", ["__builtin__ bytearray", "builtins bytearray", "__builtin__ bytes"])
def test_convert_counts_bytes_under_every_name(word: str) -> None:
    called = b"c" + word.replace(" ", "\n").encode() + b"\n\x8a\x05\0\0\0\0\x02\x85R"
    pickled = b"\x80\x02}" + text("x") + called + b"s."
    for path, data in torch_files(pickled).items():
        Path(path).write_bytes(data)
    Path("in.pkl").write_bytes(pickled)
    assert processes.run(COUNTED, folder=Path.cwd()).said() < 1 << 30


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ALWAYS_HELD_NBYTES", 1 << 20)
    monkeypatch.setattr(limits, "HELD_GROWTH", 1)


@pytest.mark.usefixtures("small_limits")
def test_convert_holds_more_objects_with_a_larger_max_nbytes() -> None:
    Path("in.pkl").write_bytes(pickle.dumps({"w": numpy.ones(2), "many": list(range(50_000))}))
    for max_nbytes in (None, 100):
        with raises(ingot.ConversionError, "a larger max_nbytes admits it", code="too-large"):
            ingot.convert("in.pkl", "out.safetensors", max_nbytes=max_nbytes)
    ingot.convert("in.pkl", "out.safetensors", max_nbytes=16 << 20)
    assert load_file("out.safetensors")["w"].tolist() == [1, 1]


SHARED = [str(number) for number in range(1000)]


class AsSet:
    """An object that is pickled as a call of `set` with the shared list. The file contains that list once."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return set, (SHARED,)


@pytest.mark.usefixtures("small_limits")
def test_convert_counts_the_arguments_of_every_call() -> None:
    Path("in.pkl").write_bytes(pickle.dumps([AsSet() for _ in range(100)]))
    with raises(ingot.ConversionError, code="too-large"):
        ingot.convert("in.pkl", "out.safetensors")


def test_stream_rejects_a_read_past_the_end() -> None:
    stream = Stream("in.pkl", io.BytesIO(b"abc"), end=3)
    with raises(ingot.ConversionError, code="truncated", expected=4, found=3):
        stream.read(4)
    assert stream.read(3) == b"abc"
