"""Conversion from other formats: `ingot.convert`.

`formats.resolved` detects the format of a file, a function of `sources` adds its tensors to `Contents`, and
`selection` chooses the tensors of the new file. `write` writes them one at a time, and compares the new file
with the source before it is renamed. `conversion` combines these steps.

Only `cli` may import this package.
"""

from __future__ import annotations

from typing import Any

from ingot._base.frameworks import installing

from .report import Conversion, LeftOut

try:
    from .conversion import convert, listed, planned
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

    def convert(*args: Any, **options: Any) -> Conversion:
        """Convert a file from another format. Needs numpy: ``pip install 'ingot-tensors[convert]'``."""
        # Raised by the call, since programs that list the names of `ingot` convert nothing.
        raise ModuleNotFoundError(
            f"ingot.convert needs numpy, which is not installed: {installing('convert')}", name="numpy"
        )

    listed = planned = convert  # type: ignore[assignment]


__all__ = ["Conversion", "LeftOut", "convert", "listed", "planned"]
