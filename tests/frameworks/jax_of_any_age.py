"""Names that jax has moved since the oldest version that ingot supports."""

from __future__ import annotations

from typing import Any

import jax


def enable_x64(wanted: bool) -> Any:
    """Return a context in which jax has 64-bit dtypes if `wanted`, and 32-bit dtypes otherwise."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(wanted)
    from jax.experimental import enable_x64

    return enable_x64(wanted)
