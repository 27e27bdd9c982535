"""The formats of this package: .safetensors and .bt."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ingot._convert.source import Contents, Entry, Options
from ingot._open import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The tensors in the order of the file, and its metadata."""
    # Read, not mapped: what is read of a mapping stays in memory until all of it is let go.
    with safe_open(path, "numpy", backend="pread") as file:
        infos = [file.info(name) for name in file.offset_keys()]
        yield Contents(
            [Entry(one.name, one.dtype, one.shape, partial(file.get_tensor, one.name)) for one in infos],
            metadata=file.metadata() or {},
        )
