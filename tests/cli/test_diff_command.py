"""`ingot diff --values` computes the same numbers as NumPy, for every pair of dtypes, in little memory."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
from support.commands import command_line, environment, good, in_a_pipe, run
from support.models import Arrays, save
from support.processes import python

FLOATS = (
    numpy.float64,
    numpy.float32,
    numpy.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)
INTEGERS = tuple(numpy.dtype(f"{sign}{size}") for sign in "iu" for size in (1, 2, 4, 8))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(ours: Arrays, theirs: Arrays) -> dict[str, dict[str, Any]]:
    """Return the differences of values by name."""
    save(Path("one.safetensors"), ours)
    save(Path("two.safetensors"), theirs)
    ended = run("diff", "one.safetensors", "two.safetensors", "--values", "--json")
    assert ended.code in (0, 1), ended
    found: dict[str, dict[str, Any]] = ended.json()["values"]
    return found


def normal(dtype: Any, seed: int, size: int = 100_001) -> Any:
    return numpy.random.default_rng(seed).standard_normal(size).astype(dtype)


def whole(dtype: Any, seed: int) -> Any:
    bounds = numpy.iinfo(dtype)
    random = numpy.random.default_rng(seed)
    return random.integers(bounds.min, bounds.max, 10_001, dtype=dtype, endpoint=True)


def expected(ours: Any, theirs: Any) -> dict[str, Any]:
    """Return the differences as NumPy computes them in 64 bits."""
    one, two = ours.astype(numpy.float64), theirs.astype(numpy.float64)
    apart = one - two
    return {
        "different": int(numpy.count_nonzero(apart)),
        "max_abs": float(numpy.abs(apart).max()),
        "relative_l2": float(numpy.linalg.norm(apart) / numpy.linalg.norm(one)),
        "cosine": float(one @ two / numpy.linalg.norm(one) / numpy.linalg.norm(two)),
    }


@pytest.mark.parametrize("two", FLOATS, ids=lambda dtype: numpy.dtype(dtype).name)
@pytest.mark.parametrize("one", FLOATS, ids=lambda dtype: numpy.dtype(dtype).name)
def test_diff_of_floats_equals_numpy(one: Any, two: Any) -> None:
    ours, theirs = normal(one, 1), normal(two, 2)
    found = compared({"a": ours}, {"a": theirs})["a"]
    known = expected(ours, theirs)
    assert (found["different"], found["max_abs"]) == (known["different"], known["max_abs"])
    assert found["relative_l2"] == pytest.approx(known["relative_l2"], rel=1e-9)
    assert found["cosine"] == pytest.approx(known["cosine"], rel=1e-9)


@pytest.mark.parametrize("two", INTEGERS, ids=str)
@pytest.mark.parametrize("one", INTEGERS, ids=str)
def test_diff_of_integers_is_exact(one: Any, two: Any) -> None:
    ours, theirs = whole(one, 1), whole(two, 2)
    found = compared({"a": ours}, {"a": theirs})["a"]
    apart = [abs(a - b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
    assert found["different"] == sum(distance > 0 for distance in apart)
    assert found["max_abs"] == max(apart)
    assert isinstance(found["max_abs"], int)
    assert found["relative_l2"] == pytest.approx(expected(ours, theirs)["relative_l2"], rel=1e-9)


def test_diff_finds_integers_that_floats_cannot_tell_apart() -> None:
    ours = numpy.array([2**63 - 1, 5])
    found = compared({"a": ours}, {"a": ours - [1, 0]})["a"]
    assert (found["different"], found["max_abs"]) == (1, 1)
    found = compared({"a": ours}, {"a": ours.astype(numpy.float64)})["a"]
    assert (found["different"], found["max_abs"]) == (1, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e5m2"])
def test_diff_norms_ignore_values_that_are_not_finite_in_both(dtype: str) -> None:
    odd = numpy.array([math.nan, math.inf, -math.inf])
    ours, theirs = numpy.array([3.0, 4.0]), numpy.array([3.0, 2.0])
    arrays = [numpy.concatenate([odd, values]).astype(dtype) for values in (ours, theirs)]
    found = compared({"a": arrays[0]}, {"a": arrays[1]})["a"]
    assert found == pytest.approx(expected(ours, theirs), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "other", "max_abs"),
    [
        (1.0, math.nan, "nan"),
        (math.nan, 1.0, "nan"),
        (math.inf, math.nan, "nan"),
        (1.0, math.inf, "inf"),
        (math.inf, -math.inf, "inf"),
    ],
)
def test_diff_reports_values_that_are_not_finite_in_one(value: float, other: float, max_abs: str) -> None:
    ours, theirs = (numpy.array([2.0, 5.0, one]) for one in (value, other))
    found = compared({"a": ours}, {"a": theirs})["a"]
    assert (found["different"], found["max_abs"], found["cosine"]) == (1, max_abs, "nan")


def test_diff_compares_values_not_bytes() -> None:
    values = numpy.array([0.0, 1.5, math.nan, math.inf])
    assert compared({"a": values}, {"a": values.astype(ml_dtypes.bfloat16)}) == {}
    assert compared({"a": values}, {"a": values * numpy.array([-1.0, 1.0, 1.0, 1.0])}) == {}
    assert compared({"a": numpy.zeros((0, 3))}, {"a": numpy.ones((0, 3), numpy.int8)}) == {}
    assert compared({"a": numpy.array(3)}, {"a": numpy.array(3.0)}) == {}


def test_diff_counts_a_complex_number_as_two_values() -> None:
    ours = numpy.array([1 + 2j, 3 - 4j], numpy.complex64)
    found = compared({"a": ours}, {"a": ours.real})["a"]
    assert (found["different"], found["max_abs"]) == (2, 4.0)
    found = compared({"a": ours}, {"a": ours + 1j})["a"]
    assert (found["different"], found["max_abs"]) == (2, 1.0)


def test_diff_reports_other_shapes_only() -> None:
    save(Path("one.safetensors"), {"a": numpy.zeros(4)})
    save(Path("two.safetensors"), {"a": numpy.ones((2, 2))})
    found = run("diff", "one.safetensors", "two.safetensors", "--values", "--json").json()
    assert (len(found["tensors"]), found["values"]) == (1, {})


def test_diff_compares_six_bit_floats_by_bytes() -> None:
    for name, data in (("one", b"\1\2\3"), ("two", b"\1\2\3"), ("other", b"\1\2\4")):
        ingot.serialize_file(
            {"a": {"dtype": "F6_E2M3", "shape": [4], "data": data}}, f"{name}.safetensors", durable=False
        )
    assert good("diff", "one.safetensors", "two.safetensors", "--values").out == ""
    ended = run("diff", "one.safetensors", "other.safetensors", "--values")
    assert (ended.code, ended.rows()) == (1, [["*", "a", "-", "-", "-", "-"]])
    found = run("diff", "one.safetensors", "other.safetensors", "--values", "--json").json()["values"]
    assert {*found["a"].values()} == {None}


def test_diff_compares_a_checkpoint_with_a_file() -> None:
    arrays = {f"layer.{at}": normal(numpy.float32, at, 10_000 + at) for at in range(40)}
    save(Path("one.safetensors"), arrays)
    ingot.split("one.safetensors", "shards", 200_000)
    arrays["layer.7"] = arrays["layer.7"] + 1
    arrays["layer.39"][-1] += 2
    # In another order than in the sharded model.
    save(Path("other.safetensors"), {**dict(reversed(arrays.items())), "wide": numpy.zeros(3)})
    found = run("diff", "shards", "other.safetensors", "--values", "--json").json()["values"]
    assert {name: row["different"] for name, row in found.items()} == {"layer.7": 10_007, "layer.39": 1}
    assert found["layer.39"]["max_abs"] == pytest.approx(2, abs=1e-6)


def holes(path: Path, elements: int, last: bytes) -> None:
    """Write a sparse file of one large F32 tensor: zeros, except the last bytes."""
    nbytes = 4 * elements
    header = json.dumps({"a": {"dtype": "F32", "shape": [elements], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(nbytes - len(last), os.SEEK_CUR)
        file.write(last)


def test_diff_takes_constant_memory(folder: Path) -> None:
    holes(folder / "one", 1 << 27, b"\0\0\0\0")
    holes(folder / "two", 1 << 27, b"\0\0\x80\x3f")
    program = (
        "import sys; from pathlib import Path; from ingot.cli.program import run; run(['doctor', '-q'])\n"
        "def peak(): return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "before = peak(); code = run(['diff', 'one', 'two', '--values']); print(code, peak() - before)"
    )
    *_, row, told = python("-c", program, **environment()).out.splitlines()
    assert row == "*\ta\t1\t1\t-\t-"
    code, kib = map(int, told.split())
    assert code == 1
    # Two tensors of 512 MiB.
    assert kib < 32 << 10


def test_diff_ends_after_ctrl_c(folder: Path) -> None:
    holes(folder / "one", 1 << 36, b"\0\0\0\0")
    holes(folder / "two", 1 << 36, b"\0\0\x80\x3f")
    process = subprocess.Popen(
        command_line("diff", "one", "two", "--values"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    reads = Path(f"/proc/{process.pid}/io")
    until = time.monotonic() + 60
    # A signal before the first read would only interrupt the start of Python.
    while int(reads.read_text().split("rchar:")[1].split()[0]) < 1 << 30:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")


def test_diff_in_a_pipe_prints_exact_integers(folder: Path) -> None:
    save(folder / "one", {"a": numpy.array([2**62 + 1])})
    save(folder / "two", {"a": numpy.array([-1])})
    (row,) = in_a_pipe("diff", "one", "two", "--values", folder=folder).rows()
    assert row[:4] == ["*", "a", "1", str(2**62 + 2)]


def test_diff_in_a_pipe_notes_that_values_are_not_compared(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / f"{number}.safetensors", {"w": numpy.full(3, number, "f4")})
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    ended = run("diff", *files)
    assert (ended.code, ended.out) == (0, "")
    assert "--values compares the values too" in ended.err
    for words in (["--quiet"], ["--json"], ["--values"]):
        assert run("diff", *files, *words).err == ""
