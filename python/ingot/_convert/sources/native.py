"""The formats of this package: .safetensors and .bt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from numpy.lib.stride_tricks import as_strided

from ingot._base.frameworks import adapter
from ingot._base.options import Loading
from ingot._convert.source import Contents, Entry
from ingot._native import STALE_KEYS
from ingot._read.door import open_checkpoint

if TYPE_CHECKING:
    from ingot.numpy import Array

    Part = tuple[Sequence[int], Sequence[int], int]


def read(contents: Contents) -> None:
    """Add the tensors in the order of the file, then the aliases, and the metadata."""
    # Read, not mapped, since read pages of a mapping stay in memory until it is closed.
    file = contents.enter_context(closing(open_checkpoint(contents.path, Loading("pread"), lent=True)))
    infos = {name: file.info(name) for name in file.offset_names()}
    wrap = adapter("numpy").wrap

    def entry(name: str, of: str, part: Part | None) -> Entry:
        info, read = infos[of], partial(file.tensor, of, wrap)
        if part is None:
            return Entry(name, info.dtype, info.shape, read, memory=of)
        if info.dtype == "F4":
            reason = f"it is stored as a part of `{of}`, whose elements are packed two to a byte"
            raise contents.refusal(reason, "unsupported-dtype", name, found=info.dtype)
        shape, stride, begin = part
        memory = (of, tuple(shape), tuple(stride), begin)
        return Entry(name, info.dtype, tuple(shape), lambda: _cut(read(), *part), memory=memory)

    for name in infos:
        contents.add(name, entry, name, name, None)
    for name, (of, part) in file.shared().items():
        contents.add(name, entry, name, of, part)
    pairs = file.metadata() or {}
    contents.metadata |= {key: pairs[key] for key in pairs if key not in STALE_KEYS}


def _cut(array: Array, shape: Sequence[int], stride: Sequence[int], begin: int) -> Array:
    """Return a part of an array in C order. The record was proven to stay inside of it."""
    steps = [step * array.itemsize for step in stride]
    return as_strided(array.reshape(-1)[begin:], shape, steps, writeable=False)
