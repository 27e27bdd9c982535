"""Conversion of .npy and .npz, and to .npz."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
from ingot import _convert
from ingot.numpy import load_file, save_file
from support.errors import raises

from .conftest import Payload

ARRAYS = {
    "plain": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "big": numpy.arange(4, dtype=">i4"),
    "bool": numpy.array([True, False]),
    "scalar": numpy.float16(2.5),
    "empty": numpy.zeros((0, 3), numpy.uint8),
    "complex": numpy.ones(2, numpy.complex64),
    "a/b.c": numpy.ones(1, numpy.int64),
}


def test_convert_reads_npy_as_numpy_does() -> None:
    arrays = {name: numpy.ascontiguousarray(array) for name, array in ARRAYS.items() if name != "scalar"}
    save_file(arrays | {"scalar": ARRAYS["scalar"]}, "in.safetensors", {"title": "x"})
    report = ingot.convert("in.safetensors", "out.npz")
    with numpy.load("out.npz", allow_pickle=False) as found:
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            numpy.testing.assert_array_equal(found[name], array)
            assert found[name].shape == array.shape
    assert [(one.name, one.kind, one.value) for one in report.left_out] == [("title", "metadata", "x")]
    ingot.convert("in.safetensors", "again.npz")
    assert Path("again.npz").read_bytes() == Path("out.npz").read_bytes()


def test_convert_rejects_what_npz_cannot_hold() -> None:
    save_file({"half": numpy.ones(3, ml_dtypes.bfloat16)}, "in.safetensors")
    with pytest.raises(ingot.SaveError, match=r"tensor `half`: an .npz has no dtype for BF16"):
        ingot.convert("in.safetensors", "out.npz")
    assert not Path("out.npz").exists()
    ingot.convert("in.safetensors", "out.npz", dtype="F32")
    with numpy.load("out.npz") as found:
        assert found["half"].dtype == numpy.float32


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a\\b", "C:evil", "a//b"])
def test_convert_writes_no_npz_member_outside_the_archive(name: str) -> None:
    save_file({name: numpy.ones(1)}, "in.safetensors")
    with raises(ingot.SaveError, "path out of the folder", code="unsafe-name"):
        ingot.convert("in.safetensors", "out.npz")


def test_convert_leaves_out_arrays_of_objects(payload: Payload) -> None:
    objects = numpy.empty(1, object)
    objects[0] = payload
    numpy.savez("in.npz", objects=objects, plain=ARRAYS["plain"], text=numpy.array(["a"]))
    report = ingot.convert("in.npz", "out.safetensors")
    assert set(load_file("out.safetensors")) == {"plain"}
    assert {one.name for one in report.left_out} == {"objects.npy", "text.npy"}
    numpy.save("in.npy", objects)
    with raises(ingot.ConversionError, "no tensor in it is selected", code="no-tensors"):
        ingot.convert("in.npy", "other.safetensors")


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
def test_convert_reads_bfloat16_of_npz(save: Any) -> None:
    half = numpy.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16)
    fives = numpy.arange(8).astype(ml_dtypes.float8_e5m2)
    fours = numpy.arange(4).astype(ml_dtypes.float8_e4m3fn)
    save("in.npz", half=half, turned=half.T, fives=fives, fours=fours, void=numpy.zeros(2, "V2"))
    report = ingot.convert("in.npz", "out.safetensors")
    found = load_file("out.safetensors")
    assert found.keys() == {"half", "turned", "fives"}
    for name, expected in (("half", half), ("turned", half.T), ("fives", fives)):
        assert found[name].dtype == expected.dtype
        numpy.testing.assert_array_equal(found[name].astype("f4"), expected.astype("f4"))
    # A void of one byte may be any of several floats or an integer, and a larger void is no number.
    assert {(one.name, one.value) for one in report.left_out} == {("fours.npy", "<V1"), ("void.npy", "|V2")}
    numpy.save("in.npy", half)
    ingot.convert("in.npy", "lone.safetensors")
    assert load_file("lone.safetensors")["tensor"].tobytes() == half.tobytes()


def test_convert_reports_a_damaged_array_if_selected() -> None:
    numpy.save("in.npy", numpy.ones(2))
    with zipfile.ZipFile("in.npz", "w") as archive:
        archive.writestr("good.npy", Path("in.npy").read_bytes())
        archive.writestr("bad.npy", b"no array at all")
        archive.writestr("short.npy", Path("in.npy").read_bytes()[:-1])
    ingot.convert("in.npz", "out.safetensors", keys="good")
    for name in ("bad", "short"):
        with pytest.raises(ingot.ConversionError, match=f"tensor `{name}`: "):
            ingot.convert("in.npz", f"{name}.safetensors", keys=name)


def test_convert_rejects_too_many_dimensions() -> None:
    header = {"w": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}
    raw = json.dumps(header).encode()
    Path("in.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"x")
    with raises(ingot.ConversionError, r"tensor `w`: 65 dimensions: expected 64", code="dimensions"):
        ingot.convert("in.safetensors", "out.bt")


def test_convert_rejects_a_zip_bomb_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert.limits, "ALWAYS_NBYTES", 1 << 20)
    numpy.savez_compressed("bomb.npz", zeros=numpy.zeros(16 << 20, numpy.uint8))
    assert Path("bomb.npz").stat().st_size * _convert.limits.GROWTH < 2 << 20
    with raises(
        ingot.ConversionError, r"16,777,344 bytes.*limit is 1,6.*max_nbytes=16777344", code="too-large"
    ):
        ingot.convert("bomb.npz", "out.safetensors")
    ingot.convert("bomb.npz", "out.safetensors", max_nbytes=16777344)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,), }", "not describe an array"),
        (
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os'),), }",
            "not describe an array",
        ),
        (b"[" * 5000, "not describe an array"),
        (b"{'descr': '|b4', 'fortran_order': False, 'shape': (2,), }", "its dtype is unknown: `|b4`"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (8796093022208,), }", "truncated"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (), }", "follow the array"),
    ],
)
def test_convert_rejects_a_hostile_npy_header(header: bytes, word: str) -> None:
    Path("in.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(8))
    with pytest.raises(ingot.ConversionError, match=f"in.npy: .*{re.escape(word)}"):
        ingot.convert("in.npy", "out.safetensors")


@pytest.mark.parametrize(
    ("version", "shape"),
    [
        (b"\1\0", "(2,),\xa0"),
        (b"\1\0", "(2,),\x0b"),
        (b"\1\0", "(2),"),
        (b"\1\0", "(02,),"),
        (b"\1\0", "(2,,),"),
        (b"\1\0", "(,2),"),
        (b"\3\x75", "(2,),"),
    ],
)
def test_convert_rejects_headers_that_numpy_rejects(version: bytes, shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode("latin-1")
    length = struct.pack("<I", len(header))[: 2 if version[0] == 1 else 4]
    Path("in.npy").write_bytes(b"\x93NUMPY" + version + length + header + b"ab")
    with pytest.raises(ValueError, match=r"header|version|shape"):
        numpy.load("in.npy")
    with raises(ingot.ConversionError, code="npy-header"):
        ingot.convert("in.npy", "out.safetensors")


def test_convert_reads_shapes_as_numpy_does() -> None:
    for shape, expected in {"()": (), "(2,)": (2,), "( 2L, 1 )": (2, 1), "(2,1,00,)": (2, 1, 0)}.items():
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode("latin-1")
        data = bytes(int(numpy.prod(expected, dtype=int)))
        Path("in.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data)
        ingot.convert("in.npy", "out.safetensors", overwrite=True)
        assert load_file("out.safetensors")["tensor"].shape == expected


def test_convert_rejects_a_long_npy_header_before_reading_it() -> None:
    Path("in.npy").write_bytes(b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 31) + bytes(8))
    with pytest.raises(ingot.ConversionError, match="2147483648 bytes, and the limit is 10000"):
        ingot.convert("in.npy", "out.safetensors")


def damaged(find: bytes, put: bytes, *, last: bool = False) -> None:
    data = Path("in.npz").read_bytes()
    place = data.rindex(find) if last else data.index(find)
    Path("in.npz").write_bytes(data[:place] + put + data[place + len(find) :])


def test_convert_rejects_two_members_of_one_name() -> None:
    numpy.savez("in.npz", aa=numpy.ones(2), bb=numpy.zeros(2))
    data = Path("in.npz").read_bytes()
    Path("in.npz").write_bytes(data.replace(b"bb.npy", b"aa.npy"))
    with raises(ingot.ConversionError, r"member `aa.npy` is in it twice", code="duplicate-member"):
        ingot.convert("in.npz", "out.safetensors")


def test_convert_rejects_a_member_with_another_local_header() -> None:
    numpy.savez("in.npz", aa=numpy.ones(2))
    damaged(b"aa.npy", b"bb.npy")
    with pytest.raises(ingot.ConversionError, match="in its own header"):
        ingot.convert("in.npz", "out.safetensors")


def test_convert_rejects_an_encrypted_member() -> None:
    numpy.savez("in.npz", aa=numpy.ones(2))
    data = bytearray(Path("in.npz").read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1
    Path("in.npz").write_bytes(data)
    with pytest.raises(ingot.ConversionError, match="is encrypted"):
        ingot.convert("in.npz", "out.safetensors")


def test_convert_rejects_members_of_a_wrong_size() -> None:
    numpy.save("in.npy", numpy.ones(2))
    with zipfile.ZipFile("in.npz", "w") as archive:
        archive.writestr("aa.npy", Path("in.npy").read_bytes().replace(b"(2,)", b"(3,)"))
    with pytest.raises(ingot.ConversionError, match=r"shape \[3\] of F64 needs 24 bytes, found 16"):
        ingot.convert("in.npz", "out.safetensors")


def test_convert_reads_the_archive_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives: list[object] = []
    real = zipfile.ZipFile.__init__
    count = 500
    numpy.savez_compressed(tmp_path / "in.npz", **{f"a{number}": numpy.ones(3) for number in range(count)})

    def counted(self: zipfile.ZipFile, *given: Any, **how: Any) -> None:
        archives.append(given)
        real(self, *given, **how)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    report = ingot.convert(tmp_path / "in.npz", tmp_path / "out.safetensors")
    assert report.tensors == count
    # The archive is not opened again for each member.
    assert len(archives) < 10
