"""Conversion from other formats: `ingot.convert`.

`formats.resolved` finds the format of a file, a module of `sources` returns its `Contents`, `selection`
chooses the tensors of the new file, `write` writes them one at a time, and `conversion` compares the new file
with the source before it takes its name.

Only `cli` may use this room.
"""

from __future__ import annotations

from typing import Any

from ingot._base.frameworks import installing

from .report import Conversion, LeftOut

try:
    from .conversion import convert, planned
    from .listing import listed
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

    def convert(*args: Any, **options: Any) -> Conversion:
        """Convert a file of another format. It needs numpy: ``pip install 'ingot-tensors[convert]'``."""
        # Not before it is called: programs that list the names of `ingot` convert nothing.
        raise ModuleNotFoundError(
            f"ingot.convert needs numpy, which is not installed: {installing('convert')}", name="numpy"
        )

    listed = planned = convert  # type: ignore[assignment]


__all__ = ["Conversion", "LeftOut", "convert", "listed", "planned"]
