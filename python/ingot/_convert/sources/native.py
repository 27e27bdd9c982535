"""The formats of this package: .safetensors and .bt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from numpy.lib.stride_tricks import as_strided

from ingot._base.frameworks import adapter
from ingot._base.options import Loading
from ingot._convert.limits import refused
from ingot._convert.source import Contents, Entry, Options
from ingot._native import STALE_KEYS
from ingot._read.door import open_checkpoint

if TYPE_CHECKING:
    from ingot._native import TensorInfo
    from ingot.errors import ConversionError
    from ingot.numpy import Array

    Part = tuple[Sequence[int], Sequence[int], int]


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The tensors in the order of the file, then the names that share one of them, and its metadata."""
    # Read, not mapped: what is read of a mapping stays in memory until all of it is let go.
    with closing(open_checkpoint(path, Loading("pread"), lent=True)) as file:
        infos = {name: file.info(name) for name in file.offset_names()}
        wrap = adapter("numpy").wrap

        def entry(name: str, of: str, part: Part | None) -> Entry:
            info, read = infos[of], partial(file.tensor, of, wrap)
            if part is None:
                return Entry(name, info.dtype, info.shape, read, memory=of)
            if info.dtype == "F4":
                return Entry(name, "", (), read, fault=_packed(path, name, info))
            shape, stride, begin = part
            memory = (of, tuple(shape), tuple(stride), begin)
            return Entry(name, info.dtype, tuple(shape), lambda: _cut(read(), *part), memory=memory)

        shared = file.shared()
        entries = [entry(name, name, None) for name in infos]
        entries += [entry(name, of, part) for name, (of, part) in shared.items()]
        pairs = file.metadata() or {}
        yield Contents(entries, metadata={key: pairs[key] for key in pairs if key not in STALE_KEYS})


def _cut(array: Array, shape: Sequence[int], stride: Sequence[int], begin: int) -> Array:
    """A part of an array in C order. The record was proven to stay inside of it."""
    steps = [step * array.itemsize for step in stride]
    return as_strided(array.reshape(-1)[begin:], shape, steps, writeable=False)


def _packed(path: str, name: str, info: TensorInfo) -> ConversionError:
    return refused(
        path,
        f"it is stored as a part of `{info.name}`, whose elements are packed two to a byte",
        code="unsupported-dtype",
        tensor=name,
        found=info.dtype,
    )
