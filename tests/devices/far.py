"""The device `torch.device("far")`, which a backend in Python provides.

Its memory is host memory, and every copy to and from it is counted. torch's interface for such backends is
experimental; only this module uses it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest

from .simulator import Deleter, Device, DlTensor, Managed, Unit, capsule_of

torch = pytest.importorskip("torch")
registration = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch makes no backends in Python", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a process has one accelerator, and there is a real one", allow_module_level=True)

#: `kDLExtDev`, which torch has for devices that extensions register.
EXTENSION = 12

#: Bytes of each copy, to the device and from it.
copies: dict[str, list[int]] = {"in": [], "out": []}
#: The allocated bytes by address, their largest sum so far, and the limit of `limited`.
allocated: dict[int, int] = {}
most: list[int] = [0]
room: list[int] = []


class Limit(RuntimeError):
    """The device has no more memory."""


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Yield the copies that the block makes."""
    for sizes in copies.values():
        sizes.clear()
    most[0] = sum(allocated.values())
    yield copies


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Limit the memory of the device to `nbytes` more."""
    room.append(sum(allocated.values()) + nbytes)
    try:
        yield
    finally:
        room.clear()


# Structures and memory that torch may still read, by the address of the structure.
_alive: dict[int, Any] = {}


@Deleter
def _release(managed: Any) -> None:
    _, _, owner = _alive.pop(ctypes.addressof(managed.contents))
    if isinstance(owner, ctypes.Array):
        allocated.pop(ctypes.addressof(owner))


def _over(owner: Any, start: int, dtype: Any, shape: Any, strides: Any) -> Any:
    """Return a tensor of the device on memory that `owner` keeps alive."""
    bits = 8 * dtype.itemsize
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = (ctypes.c_int64 * max(len(shape), 1))(*strides)
    # An element type of the same size: the tensor is viewed in its own dtype later.
    unit = Unit(0, bits, 1) if bits <= 64 else Unit(5, bits, 1)
    tensor = DlTensor(start, Device(EXTENSION, 0), len(shape), unit, sizes, steps, 0)
    managed = Managed(tensor, None, _release)
    _alive[ctypes.addressof(managed)] = managed, (sizes, steps), owner
    made = torch._C._from_dlpack(capsule_of(managed))
    return made if made.dtype == dtype else torch.ops.aten.view.dtype(made, dtype)


def _allocate(shape: Any, strides: Any, dtype: Any) -> Any:
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    nbytes = max(elements if prod(shape) else 0, 1) * dtype.itemsize
    if room and sum(allocated.values()) + nbytes > room[0]:
        raise Limit(f"far: no room for {nbytes} bytes")
    memory = (ctypes.c_char * nbytes)()
    ctypes.memset(memory, 0xDB, nbytes)
    allocated[ctypes.addressof(memory)] = nbytes
    most[0] = max(most[0], sum(allocated.values()))
    return _over(memory, ctypes.addressof(memory), dtype, shape, strides)


def host(tensor: Any) -> Any:
    """Return a CPU tensor on the same memory."""
    if tensor.device.type != "far":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (elements * tensor.itemsize)).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _dense(shape: Any) -> list[int]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return steps[::-1]


class _Module(registration._DummyBackendModule):  # type: ignore[misc, name-defined]
    """The module that torch requires for a backend."""

    def is_available(self) -> bool:
        # If this were True, code that uses any available device would use this one, and need its streams.
        return False


registration._setup_privateuseone_for_python_backend("far", backend_module=_Module())
_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
_others = torch.library.Library("_", "IMPL")


def _kernel(name: str) -> Callable[[Any], Any]:
    def implement(function: Any) -> Any:
        _kernels.impl(name, function)
        return function

    return implement


@_kernel("empty.memory_format")
def _empty(size: Any, dtype: Any = None, **_: Any) -> Any:
    return _allocate(size, _dense(size), dtype or torch.get_default_dtype())


@_kernel("empty_strided")
def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Any:
    return _allocate(size, stride, dtype or torch.get_default_dtype())


@_kernel("as_strided")
def _as_strided(tensor: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    offset = tensor.storage_offset() if offset is None else offset
    start = tensor.data_ptr() + (offset - tensor.storage_offset()) * tensor.itemsize
    return _over(tensor, start, tensor.dtype, size, stride)


@_kernel("view")
def _view(tensor: Any, size: Any) -> Any:
    alike = host(tensor).view(size)
    return _over(tensor, tensor.data_ptr(), tensor.dtype, alike.shape, alike.stride())


@_kernel("_reshape_alias")
def _reshape_alias(tensor: Any, size: Any, stride: Any) -> Any:
    return _over(tensor, tensor.data_ptr(), tensor.dtype, size, stride)


@_kernel("_copy_from")
def _copy_from(values: Any, into: Any, non_blocking: bool = False) -> Any:
    if values.device != into.device:
        copies["out" if into.device.type == "cpu" else "in"].append(values.nbytes)
    host(into).copy_(host(values))
    return into


def _other(function: Any, *given: Any, **named: Any) -> Any:
    """Operations without a kernel run on the host."""
    from torch.utils._pytree import tree_map_only

    known: dict[int, Any] = {}

    def on_host(tensor: Any) -> Any:
        found = host(tensor)
        known[id(found)] = tensor
        return found

    given, named = tree_map_only(torch.Tensor, on_host, (given, named))
    found = function(*given, **named)

    def far(tensor: Any) -> Any:
        if id(tensor) in known:
            return known[id(tensor)]
        made = _allocate(tensor.shape, _dense(tensor.shape), tensor.dtype)
        host(made).copy_(tensor)
        return made

    return tree_map_only(torch.Tensor, far, found)


_others.fallback(_other, "PrivateUse1")
