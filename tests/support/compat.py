"""`ingot.compat`, installed for a block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ingot.compat


@contextmanager
def installed() -> Iterator[None]:
    """Replace safetensors by ingot within the block, although the wheel is already imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ingot.compat.install()
    try:
        yield
    finally:
        ingot.compat.uninstall()
