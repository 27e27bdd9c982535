"""The change that an adapter makes to a weight, computed some rows at a time.

A weight is a matrix here: its first dimension, and all others together. `change_of` returns an object whose
``rows(begin, end)`` returns these rows of the difference, in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy

from ingot._base.text import _quoted

if TYPE_CHECKING:
    from ingot._native import TensorInfo
    from ingot.numpy import Array

    from ._adapter import Adapter, Module

    class Change(Protocol):
        def rows(self, begin: int, end: int) -> Array: ...


class Product(NamedTuple):
    """The product of two factors of low rank."""

    up: Array
    down: Array

    def rows(self, begin: int, end: int) -> Array:
        found: Array = self.up[begin:end] @ self.down
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]


class Hadamard(NamedTuple):
    """The elementwise product of two products (LoHa)."""

    first: Product
    second: Product

    def rows(self, begin: int, end: int) -> Array:
        found = self.first.rows(begin, end)
        found *= self.second.rows(begin, end)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape


class Kronecker(NamedTuple):
    """The Kronecker product of a matrix and a weight (LoKr)."""

    first: Array
    second: Array

    def rows(self, begin: int, end: int) -> Array:
        numbers = numpy.arange(begin, end)
        height = len(self.second)
        left = self.first[numbers // height][:, :, None]
        found: Array = left * self.second[numbers % height][:, None, :]
        return found.reshape(end - begin, -1)

    @property
    def shape(self) -> tuple[int, int]:
        (height, width), (rows, columns) = self.first.shape, self.second.shape
        return height * rows, width * columns


class Difference(NamedTuple):
    """A stored difference, of the same shape as the weight."""

    adapter: Adapter
    info: TensorInfo
    dtype: str

    def rows(self, begin: int, end: int) -> Array:
        found: Array = self.adapter.numbers(self.info, self.dtype, slice(begin, end))
        return found.reshape(end - begin, -1)

    @property
    def shape(self) -> tuple[int, int]:
        return flat_shape(self.info.shape)


class Replacement(NamedTuple):
    """The difference between a stored tensor and the weight."""

    stored: Difference
    weight: Any

    def rows(self, begin: int, end: int) -> Array:
        found: Array = self.stored.rows(begin, end) - self.weight(begin, end)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape


class Decomposed(NamedTuple):
    """A change after which rows or columns of the weight are scaled to stored lengths (DoRA)."""

    change: Change
    weight: Any
    factors: Array
    """The scale of each row, as a column, or of each column, as a row."""

    def rows(self, begin: int, end: int) -> Array:
        weight = self.weight(begin, end)
        found = self.change.rows(begin, end)
        found += weight
        found *= self.factors[begin:end] if self.factors.shape[1] == 1 else self.factors
        found -= weight
        return found


def flat_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape as a matrix: a vector is a column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def change_of(
    adapter: Adapter, module: Module, info: TensorInfo, dtype: str, read: Any, block: int
) -> Change:
    """Return what a module adds to the tensor `info` of the base.

    `read` returns rows of the base, in the `dtype` of the computation. At most `block` rows are computed at
    a time.
    """
    change: Any = _change(adapter, module, info, dtype)
    fits = prod(change.shape) == prod(info.shape) and change.shape[0] == flat_shape(info.shape)[0]
    if not fits or not _has_kernel(module, info):
        reason = (
            f"module {_quoted(module.name)} changes a weight of {_shown(change.shape)}, "
            f"and {_quoted(info.name)} of the base has the shape {list(info.shape)}"
        )
        raise adapter.unfit(reason, "shape-mismatch", info.name, expected=info.shape, found=change.shape)
    if "magnitude" in module.parts:
        return _decomposed(adapter, module, info, change, read, block)
    found: Change = change
    return found


def _has_kernel(module: Module, info: TensorInfo) -> bool:
    """Return whether the kernels of the factors have the shape of the base's kernel."""
    kernels = [module.parts[part].shape[2:] for part in _WITH_KERNEL if part in module.parts]
    return len(info.shape) < 3 or all(prod(kernel) == 1 or kernel == info.shape[2:] for kernel in kernels)


_WITH_KERNEL = ("down", "mid", "difference", "lokr_w2", "lokr_t2", "hada_t1", "hada_t2")


def _shown(shape: tuple[int, int]) -> str:
    return f"{shape[0]} rows of {shape[1]} elements"


def _change(adapter: Adapter, module: Module, info: TensorInfo, dtype: str) -> Any:
    parts = module.parts
    if "difference" in parts:
        return Difference(adapter, parts["difference"], dtype)
    found = {part: adapter.numbers(one) for part, one in parts.items() if part not in _OTHERS}
    to = numpy.dtype("float64" if dtype == "F64" else "float32")
    try:
        if any(one.ndim < 2 for one in found.values()):
            raise ValueError
        if "hada_w1_a" in found:
            first = _product(found["hada_w1_a"], found["hada_w1_b"], found.get("hada_t1"), module.scaling)
            second = _product(found["hada_w2_a"], found["hada_w2_b"], found.get("hada_t2"))
            if first.shape != second.shape:
                raise ValueError
            return Hadamard(_in(to, first), _in(to, second))
        if module.kind == "LoKr":
            return _kronecker(found, module.scaling, to)
        return _in(to, _low_rank(found, module, info))
    except ValueError as fault:
        shapes = ", ".join(f"{part} {list(one.shape)}" for part, one in parts.items())
        reason = f"module {_quoted(module.name)}: the shapes of its tensors do not fit together: {shapes}"
        raise adapter.unfit(reason, "shape-mismatch", found=shapes) from fault


_OTHERS = ("alpha", "magnitude", "up_bias", "bias_difference", "difference")


def _in(dtype: numpy.dtype[Any], change: Product) -> Product:
    return Product(*(numpy.ascontiguousarray(factor.astype(dtype)) for factor in change))


def _low_rank(found: dict[str, Array], module: Module, info: TensorInfo) -> Product:
    """Return the product of the factors of LoRA, or of LoCon."""
    if "rows" in found:
        return Product(found["rows"].T * module.scaling, found["columns"].T)
    up, down = found["up"].reshape(len(found["up"]), -1), found["down"]
    if "mid" in found:
        down = numpy.einsum("ij...,jq->iq...", found["mid"], down.reshape(len(down), -1))
    change = Product(up * module.scaling, down.reshape(len(down), -1))
    if change.up.shape[1] != change.down.shape[0]:
        raise ValueError
    is_transposed = len(info.shape) == 2 and change.shape == info.shape[::-1]
    if is_transposed and (module.fan_in_fan_out or change.shape != info.shape):
        return Product(change.down.T, change.up.T)
    return change


def _product(a: Array, b: Array, core: Array | None, scaling: float = 1.0) -> Product:
    """Return a @ b, or the Tucker decomposition with this core and a transposed `a`."""
    if core is None:
        if a.shape[1] != b.shape[0]:
            raise ValueError
        return Product(a * scaling, b.reshape(len(b), -1))
    down = numpy.einsum("ij...,jr->ir...", core, b)
    return Product(a.T * scaling, down.reshape(len(down), -1))


def _kronecker(found: dict[str, Array], scaling: float, dtype: numpy.dtype[Any]) -> Kronecker:
    first = found["lokr_w1"] if "lokr_w1" in found else found["lokr_w1_a"] @ found["lokr_w1_b"]
    if "lokr_w2" in found:
        second = found["lokr_w2"]
    else:
        product = _product(found["lokr_w2_a"], found["lokr_w2_b"], found.get("lokr_t2"))
        second = product.up @ product.down
    if first.ndim != 2:
        raise ValueError
    return Kronecker((first * scaling).astype(dtype), second.reshape(len(second), -1).astype(dtype))


def _decomposed(
    adapter: Adapter, module: Module, info: TensorInfo, change: Change, read: Any, block: int
) -> Decomposed:
    """Return the change that scales to the magnitudes of DoRA."""
    stored = module.parts["magnitude"]
    magnitude = adapter.numbers(stored).reshape(-1)
    height, width = flat_shape(info.shape)
    inner = prod(info.shape[2:])
    # PEFT scales the outputs of a module. LyCORIS may also scale the inputs: the shape shows it.
    is_of_inputs = len(stored.shape) > 1 and stored.shape[0] == 1 and len(magnitude) * inner == width
    is_transposed = "rows" in module.parts or (module.fan_in_fan_out and len(info.shape) == 2)
    is_of_columns = (is_transposed or (is_of_inputs and not _is_peft_convolution(adapter, info))) and len(
        magnitude
    ) * inner == width
    is_vector = sum(dim != 1 for dim in stored.shape) <= 1
    if not is_vector or len(magnitude) != (width // inner if is_of_columns else height):
        shapes = f"the shape {list(stored.shape)}, which do not fit the shape {list(info.shape)} of the base"
        reason = f"has magnitudes of {shapes}"
        raise adapter.unfit(reason, "shape-mismatch", stored.name, expected=info.shape, found=stored.shape)
    squares = numpy.zeros(width if is_of_columns else height)
    for begin in range(0, height, block):
        end = min(begin + block, height)
        whole = (change.rows(begin, end) + read(begin, end)).astype("float64")
        if is_of_columns:
            squares += numpy.square(whole).sum(axis=0)
        else:
            squares[begin:end] = numpy.square(whole).sum(axis=1)
    if is_of_columns:
        squares = squares.reshape(-1, inner).sum(axis=1)
    norms = numpy.sqrt(squares)
    factors = numpy.divide(magnitude, norms, out=numpy.zeros_like(norms), where=norms != 0)
    dtype = read(0, 0).dtype
    if is_of_columns:
        return Decomposed(change, read, numpy.repeat(factors, inner)[None, :].astype(dtype))
    return Decomposed(change, read, factors[:, None].astype(dtype))


def _is_peft_convolution(adapter: Adapter, info: TensorInfo) -> bool:
    """Return whether PEFT stores the magnitudes of outputs in the shape (1, outputs, 1, …)."""
    return adapter.format == "peft" and len(info.shape) > 2
