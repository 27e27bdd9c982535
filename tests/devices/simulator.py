"""A simulated GPU, and a framework with tensors on it.

The driver is `fake-cuda` of this workspace. It runs queued work as late as the real driver may run it. The
framework allocates through the driver, as torch does through its caching allocator, and describes its tensors
by DLPack.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import time
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from ingot import _native
from ingot import numpy as arrays
from ingot._adapters.face import Whole

ROOT = Path(__file__).parents[2]

KINDS: dict[str, Any] = {
    "U8": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
#: Code and bits of DLPack.
UNITS = {
    "U8": (1, 8),
    "I16": (0, 16),
    "I32": (0, 32),
    "F16": (2, 16),
    "F32": (2, 32),
    "F64": (2, 64),
    "BF16": (4, 16),
    "F8_E4M3": (10, 8),
}


@cache
def built(profile: str = "dev") -> Path:
    """Build the library with a profile of cargo, and return its path."""
    # In a folder of its own, so that a parallel build does not replace it.
    target = ROOT / "target" / "simulator"
    command = [
        "cargo",
        "build",
        "--locked",
        "--package=fake-cuda",
        "--message-format=json",
        f"--profile={profile}",
    ]
    command.append(f"--target-dir={target}")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    messages = map(json.loads, ended.stdout.splitlines())
    files = [
        file
        for message in messages
        if message.get("target", {}).get("name") == "fake_cuda"
        for file in message.get("filenames", ())
    ]
    return next(Path(file) for file in files if file.endswith((".so", ".dylib", ".dll")))


#: The counters in the order in which the driver returns them.
COUNTERS = (
    *("calls", "contexts", "streams", "events", "pinned", "pinned_most", "pins", "records"),
    "copies",
    *(
        "bytes_in",
        "bytes_out",
        "host_waits",
        "without_context",
        "forked",
        "captured",
        "pageable",
        "overlapping",
        "stray",
        "deadlocks",
    ),
)


def _read(path: Path) -> str:
    """Return the text of a file, or an empty one if the file is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


class Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class Unit(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DlTensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("rank", ctypes.c_int32),
        ("unit", Unit),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """`DLManagedTensor`."""


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = (("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))

_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)

_NAME, _USED = b"dltensor", b"used_dltensor"


def capsule_of(managed: Managed) -> Any:
    """Return a capsule of a structure, which the caller keeps alive."""
    return _python.PyCapsule_New(ctypes.addressof(managed), _NAME, None)


class Array:
    """A tensor on the device. Its memory is freed when the object is deleted."""

    def __init__(self, gpus: Gpus, code: str, shape: tuple[int, ...], ordinal: int, address: int) -> None:
        self.gpus, self.code, self.shape, self.ordinal, self.address = gpus, code, shape, ordinal, address
        self.nbytes = prod(shape) * np.dtype(KINDS[code]).itemsize
        self.managed: Any = None
        self.is_allocated = False

    def __del__(self) -> None:
        if self.managed is not None:
            self.managed.contents.deleter(self.managed)
        elif self.is_allocated and not self.gpus.is_lost:
            # Freed in the order of the caller's stream, as an allocator does.
            given = None, ctypes.c_size_t(self.ordinal), ctypes.c_uint64(self.address)
            assert self.gpus.library.fake_cuda_free_in_order(*given) == 0

    def numpy(self) -> Any:
        """Return its values in the order of the caller's stream."""
        return np.frombuffer(self.gpus.seen(self), KINDS[self.code]).reshape(self.shape)


class Gpus:
    """The devices of one simulated driver, and their framework."""

    def __init__(self, directory: Path, *, seed: int = 1, devices: int = 1, profile: str = "dev") -> None:
        # A library for each test, since a driver has one state for the process.
        self.path = Path(shutil.copy(built(profile), directory / "libcuda.so"))
        self.library: Any = ctypes.CDLL(str(self.path))
        self.library.fake_cuda_allocate.restype = ctypes.c_uint64
        self.library.fake_cuda_allocate.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self.library.fake_cuda_read.argtypes = (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)
        self.library.fake_cuda_read.restype = ctypes.c_bool
        self.library.fake_cuda_fail.argtypes = (ctypes.c_uint64, ctypes.c_int)
        self.library.fake_cuda_pin_limit.argtypes = (ctypes.c_size_t,)
        self.library.fake_cuda_attribute.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
        self.library.fake_cuda_reset(ctypes.c_uint64(seed), ctypes.c_size_t(devices))
        # ingot may assume that the framework has initialised the driver.
        assert self.library.cuInit(0) == 0
        self.gpus = [
            _native.Gpu(lambda ordinal=ordinal: (ordinal, ordinal, 0), self._allocate, driver=self.path)
            for ordinal in range(devices)
        ]
        self.wrap = _native.Wrap.dlpack(self._imported, lambda code: None)
        #: The error of the next allocation.
        self.refusal: Exception | None = None
        #: Whether a call failed permanently: then nothing can be freed.
        self.is_lost = False

    def _allocate(self, ordinal: int, wanted: list[tuple[str, tuple[int, ...]]]) -> list[tuple[Array, Any]]:
        if self.refusal is not None:
            raise self.refusal
        arrays = [Array(self, code, shape, ordinal, 0) for code, shape in wanted]
        for array in arrays:
            array.address = self.library.fake_cuda_allocate(ordinal, max(array.nbytes, 1))
            array.is_allocated = True
            # A kernel of the previous owner still writes to the memory.
            self.library.fake_cuda_old_owner(
                None,
                ctypes.c_size_t(ordinal),
                ctypes.c_uint64(array.address),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_uint8(0x99),
            )
        return [(array, self._capsule(array)) for array in arrays]

    def _capsule(self, array: Array) -> Any:
        sizes = (ctypes.c_int64 * max(len(array.shape), 1))(*array.shape)
        place, unit = Device(2, array.ordinal), Unit(*UNITS[array.code], 1)
        tensor = DlTensor(array.address, place, len(array.shape), unit, sizes, None, 0)
        managed = Managed(tensor, None, Deleter())
        capsule = capsule_of(managed)
        # The structures are borrowed: the allocator keeps them as long as the tensor.
        array.kept = managed, sizes, capsule  # type: ignore[attr-defined]
        return capsule

    def _imported(self, capsule: Any) -> Any:
        address = _python.PyCapsule_GetPointer(capsule, _NAME)
        managed = ctypes.cast(address, ctypes.POINTER(Managed))
        _python.PyCapsule_SetName(capsule, _USED)
        tensor = managed.contents.tensor
        shape = tuple(tensor.shape[axis] for axis in range(tensor.rank))
        unit = tensor.unit.code, tensor.unit.bits
        code = next(code for code, known in UNITS.items() if known == unit)
        if tensor.device.kind == 1:
            size = prod(shape) * np.dtype(KINDS[code]).itemsize
            copy = ctypes.string_at(tensor.data, size)
            managed.contents.deleter(managed)
            return np.frombuffer(copy, KINDS[code]).reshape(shape)
        array = Array(self, code, shape, tensor.device.ordinal, tensor.data + tensor.byte_offset)
        array.managed = managed
        return array

    def finish(self, ordinal: int) -> None:
        """Wait until all work on the default stream of a device is done."""
        context = ctypes.c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
        assert self.library.cuCtxSetCurrent(context) == 0
        assert self.library.cuStreamSynchronize(None) == 0
        assert self.library.cuCtxSetCurrent(None) == 0
        assert self.library.cuDevicePrimaryCtxRelease_v2(ordinal) == 0

    def seen(self, array: Array) -> bytes:
        """Return the bytes of a tensor in the order of the default stream."""
        self.finish(array.ordinal)
        found = ctypes.create_string_buffer(max(array.nbytes, 1))
        assert self.library.fake_cuda_read(array.address, found, array.nbytes)
        return found.raw[: array.nbytes]

    def array(self, values: Any, ordinal: int = 0) -> Array:
        """A tensor with these values."""
        code = next(code for code, dtype in KINDS.items() if np.dtype(dtype) == values.dtype)
        ((array, _),) = self._allocate(ordinal, [(code, values.shape)])
        # Wait for the pending write of the previous owner.
        self.finish(ordinal)
        stored = values.tobytes()
        assert self.library.fake_cuda_write(
            ctypes.c_uint64(array.address), stored, ctypes.c_size_t(len(stored))
        )
        return array

    def fill(self, array: Array, byte: int) -> None:
        """Queue a kernel that fills a tensor with `byte`, on the default stream."""
        given = ctypes.c_size_t(array.ordinal), ctypes.c_uint64(array.address), ctypes.c_size_t(array.nbytes)
        assert self.library.fake_cuda_old_owner(None, *given, ctypes.c_uint8(byte)) == 0

    def stream(self, ordinal: int) -> int:
        """Return the handle of a new stream of a device."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
        assert self.library.cuCtxSetCurrent(context) == 0
        assert self.library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert self.library.cuCtxSetCurrent(None) == 0
        return stream.value or 0

    def capture(self, ordinal: int, is_capturing: bool, stream: int = 0) -> int:
        """Begin or end a capture on a stream of a device, and return the driver's code."""
        given = ctypes.c_void_p(stream), ctypes.c_size_t(ordinal), ctypes.c_bool(is_capturing)
        code: int = self.library.fake_cuda_capture(*given)
        return code

    def busy(self, ordinal: int, is_busy: bool) -> None:
        """Begin or end a kernel on the default stream of a device. It runs until a call ends it."""
        given = None, ctypes.c_size_t(ordinal), ctypes.c_bool(is_busy)
        assert self.library.fake_cuda_busy(*given) == 0

    def wait_for_copies(self, count: int) -> None:
        """Wait until `count` copies were queued."""
        deadline = time.monotonic() + 20
        while self.counted()["copies"] < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def payload(self, name: str, tensor: Any) -> Any:
        """Return the payload of a tensor to save: on the device, or a NumPy array."""
        if not isinstance(tensor, Array):
            return arrays.payload(name, tensor)
        return tensor.code, tensor.shape, (self.gpus[tensor.ordinal], self._capsule(tensor))

    def release(self) -> None:
        """Free the pinned memory, and wait for the thread that frees it."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            _native.release_pinned()
            threads = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
            # A thread that has just begun has no name yet. Then `pinned` is not 0 either.
            is_back = self.is_lost or self.counted()["pinned"] == 0
            if is_back and not any("ingot-pinned" in _read(name) for name in threads):
                return
            time.sleep(0.01)
        raise TimeoutError("pinned memory is not given back")

    def mover(self, device: Any) -> Any:
        """Return the number of `device`, or None for the CPU."""
        return None if device in (None, "cpu") else self.gpus[int(device)]

    def module(self) -> ModuleType:
        """Return a module like `ingot.torch` for the framework."""
        module: Any = ModuleType("ingot.simulated")
        # The framework has no function that indexes its tensors.
        unused: Any = None
        whole: Any = Whole(self.wrap, self.mover, unused, self.payload)
        module.wrap, module.mover, module.at = self.wrap, self.mover, unused
        module.load_file, module.load = whole.load_file, whole.load
        module.save_file, module.save = whole.save_file, whole.save
        found: ModuleType = module
        return found

    def counted(self) -> dict[str, int]:
        """Return the counters of the driver."""
        counters = (ctypes.c_uint64 * len(COUNTERS))()
        self.library.fake_cuda_counters(counters)
        return dict(zip(COUNTERS, counters, strict=True))
