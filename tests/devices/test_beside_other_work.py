"""Loads beside other work of the process: graph captures, kernels that do not end, forks, other devices."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import _native

from .simulator import Array, Gpus

TENSORS: dict[str, Any] = {
    f"{number}.{size}": np.full(size, number, "u1")
    for number, size in enumerate([5, 70_000, 300, 3 << 20] * 8)
}

#: Longer than an interrupted call takes on a busy machine.
SOON = 10.0


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(TENSORS, path, durable=False)
    return path


def all_same(found: dict[str, Any]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        isinstance(tensor, Array) and tensor.numpy().tobytes() == TENSORS[name].tobytes()
        for name, tensor in found.items()
    )


class TestCapture:
    """A capture in global mode forbids most calls to every thread that is not relaxed."""

    def test_load_leaves_other_captures_alone(self, framework: ModuleType, gpus: Gpus, path: Path) -> None:
        stream = gpus.stream(0)
        assert gpus.capture(0, True, stream) == 0
        found: list[dict[str, Any]] = []
        loading = threading.Thread(target=lambda: found.append(framework.load_file(path, 0)))
        loading.start()
        loading.join()
        # The idle thread frees memory now instead of after some seconds.
        deadline = time.monotonic() + 20
        while gpus.counted()["pinned"] and time.monotonic() < deadline:
            _native.release_pinned()
            time.sleep(0.01)
        assert gpus.counted()["pinned"] == 0
        assert gpus.counted()["captured"] == 0
        assert gpus.capture(0, False, stream) == 0
        assert all_same(found[0])

    @pytest.mark.parametrize("take", ["next", "take"])
    def test_prefetch_refuses_a_captured_stream_and_keeps_the_tensor(
        self, framework: ModuleType, gpus: Gpus, path: Path, take: str
    ) -> None:
        with ingot.safe_open(path, "simulated", device=0) as file, file.prefetch({"1.70000": None}) as loader:
            hand_out: Callable[[], Any] = (
                (lambda: next(iter(loader))[1]) if take == "next" else (lambda: loader.take("1.70000"))
            )
            gpus.wait_for_copies(1)
            assert gpus.capture(0, True) == 0
            with pytest.raises(ingot.DeviceError) as caught:
                hand_out()
            assert caught.value.code == "device-capturing"
            assert gpus.counted()["captured"] == 0
            assert gpus.capture(0, False) == 0
            assert hand_out().numpy().tobytes() == TENSORS["1.70000"].tobytes()


@pytest.fixture
def kernel(gpus: Gpus) -> Iterator[None]:
    """A kernel on the default stream of the first device, which ends after half a minute at the latest."""
    gpus.busy(0, True)
    ends = threading.Timer(3 * SOON, gpus.busy, (0, False))
    ends.start()
    yield
    ends.cancel()
    ends.join()
    gpus.busy(0, False)


class TestInterrupt:
    """Ctrl-C interrupts a call that waits for a kernel of the caller."""

    def interrupted(self, call: Callable[[], object]) -> float:
        """Return the seconds from an interrupt to the end of a loop that makes `call`."""
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        def repeat() -> None:
            timer.start()
            while True:
                call()

        timer = threading.Timer(0.3, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                repeat()
        finally:
            timer.join()
        return time.monotonic() - sent[0]

    @pytest.mark.usefixtures("kernel")
    def test_load_file_is_interrupted(self, framework: ModuleType, gpus: Gpus, path: Path) -> None:
        kept: list[Any] = []
        assert self.interrupted(lambda: kept.append(framework.load_file(path, 0))) < SOON
        gpus.busy(0, False)
        assert all_same(framework.load_file(path, 0))

    @pytest.mark.usefixtures("kernel")
    def test_get_tensor_is_interrupted(self, framework: ModuleType, gpus: Gpus, path: Path) -> None:
        kept: list[Any] = []
        with ingot.safe_open(path, "simulated", device=0) as file:
            assert self.interrupted(lambda: kept.append(file["0.5"])) < SOON
        gpus.busy(0, False)

    def test_save_file_is_interrupted(
        self, framework: ModuleType, gpus: Gpus, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        tensor = gpus.array(TENSORS["1.70000"])
        request.getfixturevalue("kernel")
        assert self.interrupted(lambda: framework.save_file({"a": tensor}, tmp_path / "t")) < SOON
        assert list(tmp_path.glob("t*")) == []
        gpus.busy(0, False)

    @pytest.mark.usefixtures("kernel")
    def test_prefetch_is_closed_while_it_waits(self, framework: ModuleType, gpus: Gpus, path: Path) -> None:
        begun = time.monotonic()
        with ingot.safe_open(path, "simulated", device=0) as file:
            loaders = [file.prefetch(dict.fromkeys(TENSORS)) for _ in range(4)]
            time.sleep(0.3)
            for loader in loaders:
                loader.close()
        assert time.monotonic() - begun < SOON
        gpus.busy(0, False)


@pytest.mark.parametrize("code", [1, 2, 304, 801, 999])
def test_load_file_works_unpinned(framework: ModuleType, gpus: Gpus, path: Path, code: int) -> None:
    gpus.library.fake_cuda_pin_limit(0)
    gpus.library.fake_cuda_pin_code(code)
    assert all_same(framework.load_file(path, 0))
    why = _native.why_pageable()
    assert why is not None
    assert "cuMemHostAlloc" in why


def test_load_file_works_after_a_device_was_reset(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    for ordinal in (0, 1, 0):
        found = framework.load_file(path, 0)
        assert all_same(found)
        for tensor in found.values():
            # The reset of the device frees the memory of device 0.
            tensor.is_allocated = ordinal != 0
        del found, tensor
        assert gpus.library.fake_cuda_device_reset(ctypes.c_size_t(ordinal)) == 0
        assert all_same(framework.load_file(path, 1))


def test_load_file_works_beside_a_device_that_is_lost(framework: ModuleType, gpus: Gpus, path: Path) -> None:
    framework.load_file(path, 0)
    gpus.is_lost = True
    assert gpus.library.fake_cuda_lose(ctypes.c_size_t(0), 700) == 0
    for _ in range(2):
        found = framework.load_file(path, 1)
        assert found.keys() == TENSORS.keys()
        assert all(tensor.numpy().tobytes() == TENSORS[name].tobytes() for name, tensor in found.items())
    with pytest.raises(ingot.DeviceError, match=r"\(700\)"):
        framework.load_file(path, 0)


def test_prefetch_keeps_its_device_when_another_one_becomes_current(gpus: Gpus, path: Path) -> None:
    current = [0]
    calls: list[int] = []

    def stream(ordinal: int) -> tuple[int, int]:
        calls.append(ordinal)
        return 0, 0

    for known in ({}, {"stream": stream}):
        current[0] = 0
        gpu = _native.Gpu(lambda: (current[0], current[0], 0), gpus._allocate, driver=gpus.path, **known)
        checkpoint = _native.Checkpoint.open(path)
        loader = checkpoint.stream([("1.70000", None), ("2.300", None)], 1 << 30, onto=gpu)
        current[0] = 1
        for name in ("1.70000", "2.300"):
            found = loader.next(gpus.wrap)
            assert found is not None
            assert (found[0], found[1].ordinal) == (name, 0)
            assert found[1].numpy().tobytes() == TENSORS[name].tobytes()
        loader.close()
        del found
        # No context was opened on the other device.
        assert gpus.counted()["contexts"] == 1
    assert calls == [0, 0]


class TestFork:
    """A forked child inherits the state of all locks, but not the threads that would release them."""

    def in_child(self, call: Callable[[], object]) -> None:
        """Run `call` in a forked child, and check that the child ends within some seconds."""
        child = os.fork()
        if child == 0:
            try:
                call()
                os._exit(0)
            except BaseException:
                os._exit(3)
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0
                return
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the child waits for a lock that nobody opens")

    @pytest.mark.parametrize("call", [_native.release_pinned, _native.why_pageable])
    def test_child_takes_no_driver_lock(self, tmp_path: Path, path: Path, call: Callable[[], object]) -> None:
        # A load that opens a FIFO as the driver's library does not return, and holds the lock for all
        # drivers.
        pipe = tmp_path / "driver"
        os.mkfifo(pipe)
        gpu = _native.Gpu(lambda: (0, None, 0), lambda stream, wanted: [], driver=pipe)
        checkpoint = _native.Checkpoint.open(path)
        failed: list[BaseException] = []

        def load() -> None:
            try:
                checkpoint.tensor("0.5", ingot.numpy.wrap, onto=gpu)
            except ingot.DeviceError as error:
                failed.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        time.sleep(0.3)
        try:
            self.in_child(call)
        finally:
            pipe.write_bytes(b"")
            loading.join()
        assert len(failed) == 1

    def test_child_frees_a_prefetch(self, framework: ModuleType, gpus: Gpus, path: Path) -> None:
        with ingot.safe_open(path, "simulated", device=0) as file:
            loader = file.prefetch(dict.fromkeys(TENSORS))
            loader.take("1.70000")
            self.in_child(loader.close)
            assert loader.take("2.300") is not None
            loader.close()
