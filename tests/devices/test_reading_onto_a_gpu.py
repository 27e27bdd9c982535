"""Every way to load tensors onto a GPU, on a simulated driver."""

from __future__ import annotations

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
from ingot._read.select import Wanted
from support.progress import Progress
from support.servers import Handler, Request, good, serving
from support.traced import traced

from .simulator import Array, Gpus

RANDOM = np.random.default_rng(7)
TENSORS: dict[str, Any] = {
    "scalar": np.array(3.5, "f4"),
    "empty": np.ones((0, 4), "f4"),
    "small": np.arange(7, dtype="i2"),
    "odd": RANDOM.integers(0, 255, 257).astype("u1"),
    "half": RANDOM.normal(size=(33, 5)).astype(ml_dtypes.bfloat16),
    "eighth": RANDOM.normal(size=(40,)).astype(ml_dtypes.float8_e4m3fn),
    "matrix": RANDOM.normal(size=(300, 200)).astype("f4"),
    # Several slots of the ring.
    "large": RANDOM.integers(0, 255, (3000, 4001)).astype("u1"),
    "table": RANDOM.normal(size=(500, 64)).astype("f4"),
}


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(TENSORS, path, durable=False)
    return path


def same(found: Any, expected: Any) -> bool:
    assert isinstance(found, Array)
    values = found.numpy()
    is_such = (values.dtype, values.shape) == (expected.dtype, expected.shape)
    return is_such and values.tobytes() == expected.tobytes()


def all_same(found: dict[str, Any], expected: dict[str, Any] = TENSORS) -> bool:
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["auto", "mmap", "pread"])
def test_load_file_fills_the_device(framework: ModuleType, gpus: Gpus, path: Path, backend: str) -> None:
    assert all_same(framework.load_file(path, 0, backend=backend))
    counted = gpus.counted()
    nbytes = sum(array.nbytes for array in TENSORS.values())
    # Gaps between small tensors are copied with them, and nothing else.
    assert nbytes <= counted["bytes_in"] < nbytes + 256 * len(TENSORS)
    assert counted["pageable"] == 0
    assert 0 < counted["pinned_most"] <= 32 << 20


def test_handles_read_onto_the_device(gpus: Gpus, path: Path) -> None:
    with ingot.safe_open(path, "simulated", device=1) as file:
        assert file.backend == "pread"
        # The next lines depend on the memory that this process pinned before.
        assert file.why.startswith("tensors are read onto a GPU in parallel, without a mapping")
        assert same(file["large"], TENSORS["large"])
        assert file["large"].ordinal == 1
        assert all_same(file.get_tensors(["half", "odd"]), {name: TENSORS[name] for name in ("half", "odd")})
        part = file.get_slice("table")
        assert same(part[10:20], TENSORS["table"][10:20])
        assert same(part[:, 3::7], TENSORS["table"][:, 3::7])
        assert same(part[[5, 1]], TENSORS["table"][[5, 1]])
        assert all_same(dict(file.prefetch()))
        with file.prefetch({"table": slice(2, 9), "scalar": None}) as loader:
            assert same(loader.take("table"), TENSORS["table"][2:9])
            assert same(loader.take("scalar"), TENSORS["scalar"])


def test_load_file_combines_options(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    found = framework.load_file(path, 0, keys=["matrix", "table"], slices={"table": (slice(None), [0, 5])})
    assert all_same(found, {"matrix": TENSORS["matrix"], "table": TENSORS["table"][:, [0, 5]]})
    found = framework.load_file(path, 0, keys="half*", dtype="F32")
    assert all_same(found, {"half": TENSORS["half"].astype("f4")})
    told = Progress()
    framework.load_file(path, 0, progress=told)
    nbytes = sum(array.nbytes for array in TENSORS.values())
    told.assert_complete(nbytes)


def test_load_file_sends_each_tensor_to_its_device(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    devices = {"la*": 1, "*a*": 0, "*": "cpu"}
    found = framework.load_file(path, devices)
    for name, tensor in found.items():
        if name.startswith("la"):
            assert (tensor.ordinal, same(tensor, TENSORS[name])) == (1, True)
        elif "a" in name:
            assert (tensor.ordinal, same(tensor, TENSORS[name])) == (0, True)
        else:
            assert tensor.tobytes() == TENSORS[name].tobytes()
    found = framework.load_file(path, devices, slices={"table": slice(3)})
    assert same(found["table"], TENSORS["table"][:3])
    assert found["odd"].tobytes() == TENSORS["odd"].tobytes()


def test_load_file_verifies_the_bytes_on_the_device(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    sealed = path.with_name("sealed.safetensors")
    ingot.numpy.save_file(TENSORS, sealed, checksums="sha256")
    assert all_same(framework.load_file(sealed, 0, verify=True))
    bytes_ = bytearray(sealed.read_bytes())
    bytes_[-5] ^= 1
    sealed.write_bytes(bytes_)
    with pytest.raises(ingot.IntegrityError):
        framework.load_file(sealed, 0, verify=True)


def test_load_file_reads_shards_in_one_pass(
    framework: ModuleType, gpus: Gpus, path: Path, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    ingot.split(path, sharded, 200_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert all_same(framework.load_file(sharded, 0))


def test_load_file_reads_buffers_and_open_files(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    assert all_same(framework.load(path.read_bytes(), 0))
    with path.open("rb") as file:
        assert all_same(framework.load_file(file, 0))


def test_load_file_is_right_in_every_order(tmp_path: Path, path: Path) -> None:
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        gpus = Gpus(tmp_path / str(seed), seed=seed)
        assert all_same(gpus.module().load_file(path, 0)), seed
        gpus.release()


def test_load_file_frees_memory_with_the_last_tensor(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    first = framework.load_file(path, 0)
    places = {name: tensor.address for name, tensor in first.items()}
    del first
    gpus.finish(0)
    # The allocator reuses returned memory first, so nothing is left if everything came back.
    again = framework.load_file(path, 0)
    assert {name: tensor.address for name, tensor in again.items()} == places
    assert all_same(again)


def test_load_file_raises_the_frameworks_memory_error(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    gpus.refusal = OutOfMemoryError("tried to allocate 20 GiB")
    with pytest.raises(OutOfMemoryError, match="tried to allocate 20 GiB"):
        framework.load_file(path, 0)
    gpus.refusal = None
    assert all_same(framework.load_file(path, 0))


def test_driver_error_names_call_and_device(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    assert all_same(framework.load_file(path, 0))
    gpus.library.fake_cuda_fail(4, 700)
    gpus.is_lost = True
    with pytest.raises(ingot.DeviceError, match=r"cu\w+ gave CUDA_ERROR_ILLEGAL_ADDRESS \(700\)") as caught:
        framework.load_file(path, 0)
    assert "an earlier operation on this device failed" in str(caught.value)
    assert caught.value.code == "device"
    assert caught.value.path == str(path)
    assert isinstance(caught.value, RuntimeError)


def test_load_file_tells_a_missing_driver_from_a_missing_device(
    gpus: Gpus, path: Path, tmp_path: Path
) -> None:
    none: Any = type(gpus.gpus[0])(lambda: (0, None, 0), gpus._allocate, driver=tmp_path / "none.so")
    gpus.gpus.append(none)
    with pytest.raises(ingot.DeviceError, match="no driver was found") as caught:
        ingot.safe_open(path, "simulated", device=2).get_tensor("small")
    assert caught.value.code == "no-driver"
    seventh: Any = type(gpus.gpus[0])(lambda: (7, None, 0), gpus._allocate, driver=gpus.path)
    gpus.gpus.append(seventh)
    with pytest.raises(ingot.DeviceError, match=r"CUDA_ERROR_INVALID_DEVICE \(101\)"):
        ingot.safe_open(path, "simulated", device=3).get_tensor("small")


def test_load_file_rejects_a_forked_child(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    framework.load_file(path, 0)
    child = os.fork()
    if child == 0:
        try:
            framework.load_file(path, 0)
        except ingot.DeviceError as error:
            os._exit(0 if error.code == "device-forked" and "spawn" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_load_file_tells_why_pinning_failed(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    gpus.library.fake_cuda_pin_limit(0)
    assert all_same(framework.load_file(path, 0))
    why = ingot._native.why_pageable()
    assert why is not None
    assert "cuMemHostAlloc" in why


# As many reads as threads for a server.
AT_ONCE = 16


def test_load_file_reads_urls_in_parallel_without_pinned_memory(framework: ModuleType, gpus: Gpus) -> None:
    tensors = {str(number): RANDOM.integers(0, 255, 2 << 20).astype("u1") for number in range(2 * AT_ONCE)}
    data = ingot.numpy.save(tensors)
    lock, all_here, here = threading.Lock(), threading.Event(), 0

    def answer(handler: Handler, request: Request) -> None:
        nonlocal here
        # The header comes first.
        if request.range[0] > 0:
            with lock:
                here += 1
                if here == AT_ONCE:
                    all_here.set()
            all_here.wait(20)
        good(data)(handler, request)

    gpus.library.fake_cuda_pin_limit(0)
    with serving(answer) as server:
        assert all_same(framework.load_file(server.url(), 0), tensors)
    assert all_here.is_set()


def test_fill_on_fills_existing_tensors(gpus: Gpus, path: Path) -> None:
    wanted = Wanted([*TENSORS])
    arrays = [gpus.array(np.zeros_like(values)) for values in TENSORS.values()]
    before = gpus.counted()["bytes_in"]
    memory = [gpus._capsule(array) for array in arrays]
    checkpoint = ingot._native.Checkpoint.open(str(path))
    checkpoint.fill_on(wanted, gpus.gpus[0], memory)
    assert all_same(dict(zip(TENSORS, arrays, strict=True)))
    assert gpus.counted()["bytes_in"] - before == sum(values.nbytes for values in TENSORS.values())
    with pytest.raises(BufferError, match="bytes of GPU 0"):
        checkpoint.fill_on(wanted, gpus.gpus[0], [memory[-1], *memory[1:]])


PROGRAM = """
import ingot.numpy, numpy as np
mark("cpu")
tensors = {"a": np.ones(1000, "f4")}
ingot.numpy.save_file(tensors, "file.safetensors")
rare = {"snapshot": "device"}
ingot.numpy.save_file(tensors, "file.safetensors", background=True, write_options=rare).result()
ingot.numpy.load_file("file.safetensors")
ingot.safe_open("file.safetensors", "np", device="cpu")["a"]
mark("driver")
try:
    ingot._native.Checkpoint.open("file.safetensors").tensor(
        "a", ingot.numpy.wrap, onto=ingot._native.Gpu(lambda: (0, None, 0), lambda stream, wanted: [])
    )
except (ingot.DeviceError, ValueError):
    # There is none, or it has nobody who allocates.
    pass
"""


def test_load_file_looks_for_no_driver_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    ended = traced(PROGRAM, folder=tmp_path / "folder", trace="openat")
    assert ended.code == 0, ended.err
    assert ended.calls["cpu"]
    assert not any("cuda" in call for call in ended.calls["cpu"])
    # The check above can fail: with a device, the trace has the driver's library.
    assert any("libcuda.so" in call for call in ended.calls["driver"])
