"""Files that a conversion writes, and files that it must not change."""

from __future__ import annotations

import builtins
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
from ingot import _convert
from ingot.numpy import load_file, save_file
from support.errors import raises
from support.processes import run
from support.progress import Progress

RANDOM = numpy.random.default_rng(0)
ARRAYS = {
    "weight": RANDOM.normal(size=(3, 5)).astype(numpy.float32),
    "count": numpy.arange(7),
    "half": RANDOM.normal(size=4).astype(numpy.float16),
}


@pytest.fixture
def source() -> str:
    numpy.savez("in.npz", **ARRAYS)
    return "in.npz"


def test_convert_reports_what_it_did(source: str) -> None:
    report = ingot.convert(source, "out.safetensors", drop="half", dtype="F16", metadata={"title": "x"})
    assert report == ingot.Conversion(
        source="in.npz",
        destination="out.safetensors",
        source_format="npz",
        format="safetensors",
        files=("out.safetensors",),
        tensors=2,
        nbytes=86,
        shared={},
        cast=("weight",),
        left_out=(),
        dropped=("half",),
        verified=True,
        prefix="",
    )
    assert ingot.inspect("out.safetensors").metadata == {"title": "x"}


def test_convert_writes_the_file_of_save_file(source: str) -> None:
    for name in ("out.safetensors", "out.bt"):
        ingot.convert(source, name)
        save_file(ARRAYS, f"expected-{name}")
        assert Path(name).read_bytes() == Path(f"expected-{name}").read_bytes()


@pytest.mark.parametrize("code", ["BF16", "F16", "F64", "F8_E4M3"])
def test_convert_casts_floats_as_load_file_does(source: str, code: str) -> None:
    save_file(ARRAYS, "in.safetensors")
    ingot.convert(source, "out.safetensors", dtype=code)
    expected = load_file("in.safetensors", dtype=code)
    for name, array in load_file("out.safetensors").items():
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == expected[name].tobytes()


def test_convert_casts_and_compares_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert.values, "PIECE_NBYTES", 64)
    arrays = {
        "flat": RANDOM.normal(size=101).astype(numpy.float32),
        "rows": RANDOM.normal(size=(9, 5)).astype(numpy.float32),
        "wide": RANDOM.normal(size=(2, 3, 50)).astype(numpy.float32),
        "ones": RANDOM.normal(size=(1, 1, 60)).astype(numpy.float32),
        "fours": numpy.zeros((3, 202), ml_dtypes.float4_e2m1fn),
    }
    save_file(arrays, "in.safetensors")
    for name, code in (("out.safetensors", "BF16"), ("out.npz", "F64"), ("plain.safetensors", None)):
        drop = None if code is None else "fours"
        ingot.convert("in.safetensors", name, dtype=code, drop=drop)
    half = load_file("out.safetensors")
    with numpy.load("out.npz") as wide:
        for key in ("flat", "rows", "wide", "ones"):
            numpy.testing.assert_array_equal(half[key], arrays[key].astype(ml_dtypes.bfloat16))
            numpy.testing.assert_array_equal(wide[key], arrays[key].astype(numpy.float64))
    assert Path("plain.safetensors").read_bytes() == Path("in.safetensors").read_bytes()


def test_convert_writes_the_shards_of_split(source: str) -> None:
    report = ingot.convert(source, "shards", max_shard_size=64)
    assert [os.path.basename(name) for name in report.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    ingot.convert("shards", "back.safetensors")
    for name, array in load_file("back.safetensors").items():
        numpy.testing.assert_array_equal(array, ARRAYS[name])


def test_convert_writes_one_file_into_a_folder_if_all_fits(source: str) -> None:
    assert ingot.convert(source, "folder/").files == (os.path.join("folder/", "model.safetensors"),)


@pytest.mark.parametrize("name", ["out.safetensors", "out.bt", "out.npz", "shards/"])
def test_convert_leaves_the_old_file_after_a_failure(source: str, name: str) -> None:
    ingot.convert(source, name)
    files = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    numpy.savez("broken.npz", good=numpy.ones(4), weak=numpy.arange(100.0))
    data = Path("broken.npz").read_bytes()
    Path("broken.npz").write_bytes(data.replace(numpy.float64(99).tobytes(), numpy.float64(1).tobytes()))
    with pytest.raises(ingot.ConversionError, match="CRC"):
        ingot.convert("broken.npz", name, overwrite=True)
    Path("broken.npz").unlink()
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz", "shards/"])
def test_convert_finds_a_wrong_value(source: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _convert.write.Task.compare

    def spoilt(task: _convert.write.Task, path: str, *arguments: Any) -> None:
        data = Path(path).read_bytes()
        one = ARRAYS["weight"].tobytes()[:4]
        assert one in data
        Path(path).write_bytes(data.replace(one, bytes(4)))
        real(task, path, *arguments)

    monkeypatch.setattr(_convert.write.Task, "compare", spoilt)
    with pytest.raises(ingot.ConversionError, match=r"weight|CRC"):
        ingot.convert(source, name)
    assert [str(path) for path in Path().rglob("*") if path.is_file()] == ["in.npz"]
    assert not ingot.convert(source, name, verify=False).verified


def test_convert_may_replace_its_source() -> None:
    save_file(ARRAYS, "in.safetensors")
    ingot.convert("in.safetensors", "in.safetensors", dtype="BF16", overwrite=True)
    assert load_file("in.safetensors")["weight"].dtype == ml_dtypes.bfloat16


def test_save_removes_the_files_of_a_killed_conversion(source: str) -> None:
    program = """
ingot.convert("in.npz", "out.safetensors", progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert run(program).signal == "SIGKILL"
    assert len(os.listdir()) > 1
    save_file(ARRAYS, "out.safetensors")
    assert sorted(os.listdir()) == ["in.npz", "out.safetensors"]


def test_convert_removes_the_downloads_of_a_killed_conversion(source: str) -> None:
    program = """
from ingot._write.directory import locked
os.mkdir(".ingot-00000001.out.safetensors.fetched")
open(".ingot-00000001.out.safetensors.fetched/in.npz", "w").close()
with locked(".ingot-00000001.out.safetensors.fetched"):
    print("", flush=True)
    if sys.argv[1:] == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
    ingot.convert("in.npz", "out.safetensors")
    say(os.listdir())
"""
    kept = run(program).said()
    assert ".ingot-00000001.out.safetensors.fetched" in kept, "another one is in the middle of it"
    shutil.rmtree(".ingot-00000001.out.safetensors.fetched")
    assert run(program, "die").signal == "SIGKILL"
    ingot.convert(source, "out.safetensors", overwrite=True)
    assert sorted(os.listdir()) == ["in.npz", "out.safetensors"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz"])
def test_convert_twice_at_once_writes_one_file(source: str, name: str) -> None:
    def second(done: int, total: int) -> None:
        with raises(ingot.StorageError, code="busy"):
            ingot.convert(source, name)

    ingot.convert(source, name, progress=second)
    assert sorted(os.listdir()) == sorted(["in.npz", name])


def test_convert_reports_progress_of_writing_and_verifying(source: str) -> None:
    told = Progress()
    report = ingot.convert(source, "out.safetensors", progress=told)
    told.assert_complete(2 * report.nbytes)

    def stop(done: int, total: int) -> None:
        raise builtins.KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingot.convert(source, "other.safetensors", progress=stop)
    assert not Path("other.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"destination": "out.pt"}, "unknown-destination"),
        ({"destination": "out.safetensors", "format": "zip"}, "unknown-format"),
        ({"destination": "out.safetensors", "source_format": "zip"}, "unknown-source-format"),
        ({"destination": "out.safetensors", "dtype": "I8"}, "no-conversion"),
        ({"destination": "out.safetensors", "max_nbytes": -1}, "invalid-size"),
        ({"destination": "out.npz", "metadata": {"a": "b"}}, "npz-metadata"),
        ({"destination": "folder", "format": "npz", "max_shard_size": 5}, "npz-shards"),
        ({"destination": "out.npz", "max_shard_size": 5}, "unknown-destination"),
        ({"destination": "out.safetensors", "max_shard_size": "5GB"}, "unknown-destination"),
    ],
)
def test_convert_rejects_unknown_choices(source: str, options: dict[str, Any], code: str) -> None:
    with raises(ingot.OptionError, code=code):
        ingot.convert(source, **options)
    assert os.listdir() == ["in.npz"]


def test_convert_compares_more_members_of_an_npz_than_it_may_open_files() -> None:
    resource = pytest.importorskip("resource")
    numpy.savez("many.npz", **{f"w{number}": numpy.ones(2) for number in range(200)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, before[1]))
    try:
        report = ingot.convert("many.npz", "out.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (report.tensors, report.verified) == (200, True)
