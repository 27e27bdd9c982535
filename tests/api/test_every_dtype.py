"""Every way to save stores a dtype of any framework unchanged, or rejects it with the tensor's name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("every_dtype.py")

# For each framework: its package, some of its dtypes that files cannot store, and some that they can.
FRAMEWORKS = {
    "numpy": (
        "numpy",
        {"complex128", "int4", "uint2", "O", "M8[s]", "text"},
        {"float32", "int16, big", "bfloat16"},
    ),
    "torch": (
        "torch",
        {f"torch.{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)},
        {"torch.float16"},
    ),
    "flax": ("jax", {"int4", "uint4", "key", "float0"}, {"bfloat16", "float4_e2m1fn"}),
    "tensorflow": ("tensorflow", {"qint8", "quint16", "qint32", "string"}, {"bfloat16", "uint16"}),
    "mlx": ("mlx", set(), {"mlx.core.bfloat16", "mlx.core.float64"}),
    "paddle": ("paddle", {"paddle.complex128"}, {"paddle.bfloat16"}),
}


def outcomes(framework: str) -> dict[str, dict[str, str]]:
    """Return the result of each dtype in each way, without dtypes that the framework has no tensors of."""
    command = [sys.executable, str(PROGRAM), framework]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert ended.returncode == 0, f"{ended.returncode} in {lines[-1:]}\n{ended.stderr[-3000:]}"
    found: dict[str, dict[str, str]] = {}
    for word, way, said in lines:
        if way != "make":
            found.setdefault(word, {})[way] = said
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_save_stores_every_dtype_or_names_the_tensor(framework: str) -> None:
    """Fails if all dtypes of torch take the fast path: then `int1` to `uint7` are stored as `int8`."""
    package, lacking, stored = FRAMEWORKS[framework]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec("ml_dtypes") is None:
        pytest.skip(f"{package} or ml_dtypes is not installed")
    found = outcomes(framework)
    refusals = {"SaveError of odd", "DtypeError of odd"}
    wrong = {}
    for word, by_way in found.items():
        # .bt lacks some dtypes, and `replace` fits only one dtype.
        alike = {said for way, said in by_way.items() if way not in ("bintensors", "replace")}
        others = {by_way["bintensors"], by_way["replace"]}
        is_stored = alike == {"same"} and others <= {"same", *refusals}
        if not is_stored and not alike | others <= refusals:
            wrong[word] = by_way
    assert wrong == {}
    assert {word for word in lacking if found[word]["file"] in refusals} == lacking
    assert {word for word in stored if found[word]["file"] == "same"} == stored
