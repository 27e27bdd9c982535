"""TensorFlow's checkpoints: files named ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``."""

from __future__ import annotations

import glob
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ingot._base.text import _escaped
from ingot._convert.refusal import refused
from ingot._convert.source import Contents, Options
from ingot._convert.tensor_bundle import TITLE, contents

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The variables of a prefix, of an index file, or of the only checkpoint in a folder."""
    yield contents(_prefix(path))


def _prefix(path: str) -> str:
    if not os.path.isdir(path):
        return path.removesuffix(".index")
    # Not from the file `checkpoint`, which may name any path at all.
    found = sorted(glob.glob(os.path.join(glob.escape(path), "*.index")))
    if len(found) != 1:
        names = ", ".join(_escaped(os.path.basename(name)) for name in found[:5])
        raise refused(
            path,
            f"{len(found)} checkpoints are in this folder: expected one — give the path of one of {names}",
            code="ambiguous",
            expected=TITLE,
            found=len(found),
        )
    return found[0].removesuffix(".index")
