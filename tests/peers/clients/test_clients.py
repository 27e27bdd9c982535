"""Libraries that use safetensors, unmodified: each flow runs on the wheel and on ingot, and both must agree.

``make test-clients`` installs the libraries. Nothing is fetched at run time: the tests make the models,
except MiniLM, which comes in a wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import ingot

HERE = Path(__file__).parent
STAND_IN = Path(ingot.__file__).parent / "compat" / "safetensors"
PINS = dict(
    line.split("==")
    for name in ("clients", "test")
    for line in (HERE.parents[2] / "requirements" / f"{name}.txt").read_text().split()
    if "==" in line
)
# The flows, each with the package name of its library.
FLOWS = {
    "accelerate": "accelerate",
    "diffusers": "diffusers",
    "huggingface_hub": "huggingface_hub",
    "peft": "peft",
    "sentence_transformers": "sentence-transformers",
    "timm": "timm",
    "torch_checkpoint": "torch",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Runs:
    """One flow, once on the wheel and once on ingot: the reports, and the folders that each has saved."""

    flow: str
    real: dict[str, Any]
    ingot: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module", params=FLOWS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run both sides at once. Each saves, loads its own files, and then loads the files of the other side."""
    flow, folder = request.param, tmp_path_factory.mktemp(request.param)
    with ThreadPoolExecutor() as pool:
        real = pool.submit(run, flow, folder, [], own="real", other="ingot")
        ours = pool.submit(run, flow, folder, ["-m", "ingot.compat"], own="ingot", other="real")
    return Runs(flow, real.result(), ours.result(), folder)


def run(flow: str, folder: Path, options: list[str], *, own: str, other: str) -> dict[str, Any]:
    """The report of one process."""
    report = folder / f"{own}.json"
    steps = [f"save={folder / own}", f"load={folder / own}", f"load={folder / other}"]
    home = folder / f"{own}.home"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home),
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        # Some libraries write sets, in the order of the hash seed.
        "PYTHONHASHSEED": "0",
        # Both processes need the same number of threads: sums in another order have other rounding errors.
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, *options, str(HERE / "flows" / f"with_{flow}.py"), str(report), *steps]
    done = subprocess.run(program, env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{flow} on {own}:\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_flows_run_the_pinned_versions(runs: Runs) -> None:
    library = FLOWS[runs.flow]
    assert runs.real["library"].partition("+")[0] == runs.ingot["library"].partition("+")[0] == PINS[library]
    # The version of the wheel, and the version that programs see.
    assert runs.real["version"] == runs.ingot["version"] == version("safetensors") == PINS["safetensors"]


def test_flows_import_the_same_names_from_ingot(runs: Runs) -> None:
    assert all(Path(file).parent == STAND_IN for file in runs.ingot["safetensors"].values())
    assert not any(Path(file).is_relative_to(STAND_IN) for file in runs.real["safetensors"].values())
    assert set(runs.real["safetensors"]) <= set(runs.ingot["safetensors"])
    assert runs.ingot["holders"] == runs.real["holders"]


def test_flows_load_the_files_of_both_sides_alike(runs: Runs) -> None:
    expected = runs.real["steps"]["load real"]
    assert sum(is_digest(value) for value in expected.values()) > 3
    for report in (runs.real, runs.ingot):
        assert report["steps"]["load real"] == expected
        assert report["steps"]["load ingot"] == expected
    assert runs.ingot["steps"]["save ingot"] == runs.real["steps"]["save real"]


def is_digest(value: Any) -> bool:
    """Return whether a line of a report describes a tensor."""
    return isinstance(value, list) and len(value) == 3 and str(value[0]).startswith("torch.")


def test_flows_save_the_same_files(runs: Runs) -> None:
    real, ours = runs.folder / "real", runs.folder / "ingot"
    files = names(real)
    assert names(ours) == files
    assert any(file.suffix == ".safetensors" for file in files)
    for file in files:
        theirs, own = (real / file).read_bytes(), (ours / file).read_bytes()
        if file.suffix == ".safetensors" and len(parts(theirs)[0].get("__metadata__", {})) > 1:
            # The wheel writes metadata keys in random order.
            assert parts(own) == parts(theirs), file
        else:
            assert own == theirs, file


def names(folder: Path) -> list[Path]:
    """The files below a folder."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data section."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]
