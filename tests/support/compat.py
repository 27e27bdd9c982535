"""`ingot.compat` for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ingot.compat


@contextmanager
def installed() -> Iterator[None]:
    """Have ingot in the place of safetensors, though the wheel was imported before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ingot.compat.install()
    try:
        yield
    finally:
        ingot.compat.uninstall()
