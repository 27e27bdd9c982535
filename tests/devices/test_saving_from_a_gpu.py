"""Every way to save tensors from a GPU, on a simulated driver."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
import ingot.numpy
from support.errors import raises

from .simulator import Array, Gpus

RANDOM = np.random.default_rng(7)
VALUES: dict[str, Any] = {
    "scalar": np.array(3.5, "f4"),
    "empty": np.ones((0, 4), "f4"),
    "small": np.arange(7, dtype="i2"),
    "half": RANDOM.normal(size=(33, 5)).astype(ml_dtypes.bfloat16),
    "eighth": RANDOM.normal(size=(40,)).astype(ml_dtypes.float8_e4m3fn),
    "matrix": RANDOM.normal(size=(300, 200)).astype("f4"),
    # Several pieces of the file.
    "large": RANDOM.integers(0, 255, (3000, 4001)).astype("u1"),
}
ON_DEVICES = sum(values.nbytes for name, values in VALUES.items() if name != "small")


@pytest.fixture
def tensors(gpus: Gpus) -> dict[str, Any]:
    """Return tensors on two devices, and one on the host."""
    found = {name: gpus.array(values, ordinal=len(name) % 2) for name, values in VALUES.items()}
    return {**found, "small": VALUES["small"]}


def right(path: Path, expected: dict[str, Any] = VALUES) -> bool:
    found = ingot.numpy.load_file(path)
    return found.keys() == expected.keys() and all(
        found[name].tobytes() == expected[name].tobytes() for name in expected
    )


@pytest.mark.parametrize("name", ["t.safetensors", "t.bt"])
@pytest.mark.parametrize(
    "options",
    [{}, {"durable": False}, {"atomic": False}, {"checksums": "sha256"}, {"write_options": {"align": 4096}}],
)
def test_save_file_writes_the_bytes_of_the_device(
    framework: ModuleType, gpus: Gpus, tensors: dict[str, Any], tmp_path: Path, name: str, options: Any
) -> None:
    if name.endswith(".bt"):
        options = {key: value for key, value in options.items() if key != "write_options"}
    framework.save_file(tensors, tmp_path / name, **options)
    assert right(tmp_path / name)
    counted = gpus.counted()
    assert counted["bytes_out"] == ON_DEVICES
    assert counted["pageable"] == 0
    # A piece of the file is a slot: a copy for each tensor in it.
    assert counted["copies"] <= ON_DEVICES / (4 << 20) + 2 * len(VALUES)
    assert counted["pinned_most"] <= 32 << 20


def test_save_to_bytes_streams_and_writers_reads_the_device(
    framework: ModuleType, gpus: Gpus, tensors: dict[str, Any], tmp_path: Path
) -> None:
    expected = ingot.numpy.save(VALUES)
    assert framework.save(tensors) == expected
    file = io.BytesIO()
    framework.save_file(tensors, file)
    assert file.getvalue() == expected
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    framework.save_file(tensors, pipe)
    reader.join()
    assert found == [expected]


def test_save_file_waits_for_the_stream(framework: ModuleType, gpus: Gpus, tmp_path: Path) -> None:
    step = gpus.array(VALUES["matrix"])
    for byte in range(9):
        gpus.fill(step, byte)
    framework.save_file({"step": step}, tmp_path / "t")
    # A later change of the tensor does not change the file.
    gpus.fill(step, 99)
    assert right(tmp_path / "t", {"step": np.full(VALUES["matrix"].nbytes, 8, "u1")})


@pytest.mark.parametrize("snapshot", ["host", False])
def test_background_save_has_the_step(
    framework: ModuleType, gpus: Gpus, tmp_path: Path, snapshot: Any
) -> None:
    step = gpus.array(VALUES["large"])
    for byte in range(9):
        gpus.fill(step, byte)
    future = framework.save_file(
        {"step": step}, tmp_path / "t", background=True, write_options={"snapshot": snapshot}
    )
    assert future.staged.done() or snapshot is False
    assert future.staged.result(60) is None
    gpus.fill(step, 99)
    assert future.result(60) is None
    assert right(tmp_path / "t", {"step": np.full(VALUES["large"].nbytes, 8, "u1")})


def test_save_file_is_right_in_every_order(tmp_path: Path) -> None:
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        gpus = Gpus(tmp_path / str(seed), seed=seed)
        step = gpus.array(VALUES["matrix"])
        for byte in range(seed):
            gpus.fill(step, byte)
        gpus.module().save_file(
            {"a": gpus.array(VALUES["eighth"]), "step": step}, tmp_path / "t", durable=False
        )
        expected = VALUES["matrix"] if seed == 0 else np.full(VALUES["matrix"].nbytes, seed - 1, "u1")
        assert right(tmp_path / "t", {"a": VALUES["eighth"], "step": expected}), seed
        gpus.release()


def test_save_file_takes_loaded_device_tensors(framework: ModuleType, gpus: Gpus, tmp_path: Path) -> None:
    path = tmp_path / "t"
    ingot.numpy.save_file(VALUES, path)
    loaded = framework.load_file(path, 1)
    assert all(isinstance(tensor, Array) for tensor in loaded.values())
    framework.save_file(loaded, path)
    assert right(path)


def test_save_file_that_fails_keeps_the_old_file(
    framework: ModuleType, gpus: Gpus, tensors: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"old")
    gpus.library.fake_cuda_fail(24, 999)
    with raises(ingot.DeviceError, r"cu\w+ gave CUDA_ERROR_UNKNOWN \(999\)", code="device"):
        framework.save_file(tensors, path)
    assert path.read_bytes() == b"old"
    framework.save_file(tensors, path)
    assert right(path)
    folder = set(os.listdir(tmp_path))
    assert not any(name.startswith(".t") for name in folder), folder


def test_save_file_rejects_a_captured_stream(
    framework: ModuleType, gpus: Gpus, tensors: dict[str, Any], tmp_path: Path
) -> None:
    on_the_first = {"scalar": tensors["scalar"]}
    assert tensors["scalar"].ordinal == 0
    assert gpus.capture(0, True) == 0
    with raises(ingot.DeviceError, code="device-capturing"):
        framework.save_file(on_the_first, tmp_path / "t")
    assert gpus.counted()["captured"] == 0
    assert gpus.capture(0, False) == 0
    framework.save_file(tensors, tmp_path / "t")
    assert right(tmp_path / "t")


def test_save_file_rejects_memory_on_another_device(gpus: Gpus, tmp_path: Path) -> None:
    from ingot import _native

    array = gpus.array(VALUES["matrix"], 1)
    wrong = [
        ("F32", [300, 200], (gpus.gpus[0], gpus._capsule(array))),
        ("F32", [300, 201], (gpus.gpus[1], gpus._capsule(array))),
    ]
    for given in wrong:
        with raises(ingot.SaveError, "tensor `a`", code="no-values"):
            _native.serialize({"a": array}, lambda name, tensor, given=given: given, None, "safetensors")
