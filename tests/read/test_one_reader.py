"""Numbers of reads: parts and conversions of many tensors take hardly more reads than whole tensors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

import ingot.numpy
from support.processes import run
from support.traced import traced

COUNT = 5000
OPTIONS = {
    "dtype": "dict(dtype='F16')",
    "out": "dict(out={name: numpy.empty((8, 16), numpy.float32) for name in names})",
    "out, dtype": "dict(out={name: numpy.empty((8, 16), numpy.float16) for name in names}, dtype='F16')",
    "out, turned": "dict(out={name: numpy.empty((16, 8), numpy.float32).T for name in names})",
    "rows": "dict(slices=dict.fromkeys(names, slice(4, None)))",
    "columns": "dict(slices=dict.fromkeys(names, numpy.s_[:, 8:]))",
    "steps": "dict(slices=dict.fromkeys(names, numpy.s_[:, ::2]))",
    "columns, dtype": "dict(slices=dict.fromkeys(names, numpy.s_[:, :8]), dtype='F16')",
    "every second": "dict(keys=names[::2])",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = numpy.random.default_rng(1).random((COUNT, 8, 16), numpy.float32)
    path = tmp_path_factory.mktemp("many") / "many.safetensors"
    ingot.numpy.save_file({f"layers.{number:04}": array for number, array in enumerate(values)}, path)
    return path


@pytest.mark.parametrize("what", OPTIONS)
def test_slices_take_as_many_reads_as_whole_tensors(
    path: Path, tmp_path: Path, backend: str, what: str
) -> None:
    ran = traced(
        f"""
path = sys.argv[1]
whole = ingot.numpy.load_file(path, backend="pread")
names = [*whole]
options = {OPTIONS[what]}
mark("whole")
ingot.numpy.load_file(path, backend="pread")
mark("less")
found = ingot.numpy.load_file(path, backend="{backend}", **options)
mark("done")
slices = options.get("slices", {{}})
for name, array in found.items():
    expected = whole[name][slices.get(name, ...)]
    assert (array == (expected.astype("float16") if "dtype" in options else expected)).all()
""",
        path,
        folder=tmp_path,
        trace="pread64,preadv,process_vm_writev",
    )
    assert ran.code == 0, ran.err

    def reads(name: str) -> int:
        return sum(bool(re.match(r"(pread|process_vm_writev)", call)) for call in ran.calls[name])

    assert reads("less") <= 4 * reads("whole") + 20


def test_slices_and_conversions_take_the_memory_of_the_result(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "large.safetensors"
    ingot.numpy.save_file({f"{number}": numpy.ones((1024, 4096), numpy.float32) for number in range(8)}, path)
    ran = run(
        f"""
path = sys.argv[1]
names = [str(number) for number in range(8)]
out = {{name: numpy.ones((4096, 1024), numpy.float32).T for name in names}}
half = numpy.s_[:, ::2]
ingot.numpy.load_file(path, backend="{backend}", keys=["0"], dtype="F16")
for options in [dict(slices=dict.fromkeys(names, half)), dict(dtype="F16"), dict(out=out)]:
    gc.collect()
    forget_peak()
    before = memory("VmRSS")
    found = ingot.numpy.load_file(path, backend="{backend}", threads=4, **options)
    # What has been touched of a mapping is the page cache's.
    kept = sum(array.nbytes for array in found.values()) if "out" not in options else 0
    say(memory("VmHWM") - before - kept)
    del found
""",
        path,
    )
    assert ran.code == 0, ran.err
    assert all(int(beside) < 64 << 20 for beside in ran.out.split()), ran.out
