"""Conversion from other formats: `ingot.convert`.

The way of data: `formats.resolved` says what a file is, a module of `sources` gives its `Contents`,
`selection` decides which tensors go into the new file, `write` writes them one at a time beside their
`destination`, and `verify` compares them before the new file takes its name.
"""

from __future__ import annotations

from .conversion import convert
from .report import Conversion
from .source import LeftOut

__all__ = ["Conversion", "LeftOut", "convert"]
