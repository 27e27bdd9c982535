"""Conversion from other formats: `ingot.convert`.

The way of data: `formats.resolved` says what a file is, a module of `sources` gives its `Contents`,
`selection` decides which tensors go into the new file, `write` writes them one at a time beside their
`destination`, and `verify` compares them before the new file takes its name.

Only `cli` may use this room.
"""

from __future__ import annotations

from .others import LeftOut
from .report import Conversion

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

try:
    from .conversion import convert, planned
    from .listing import listed
except ModuleNotFoundError as error:
    _missing = error

    def convert(*args: Any, **options: Any) -> Conversion:
        """Convert a file of another format. It needs numpy: ``pip install 'ingot-tensors[convert]'``."""
        # Not before it is called: whoever looks at what `ingot` has does not want to convert anything.
        raise ModuleNotFoundError(str(_missing), name=_missing.name) from _missing

    listed = planned = convert  # type: ignore[assignment]


__all__ = ["Conversion", "LeftOut", "convert", "listed", "planned"]
