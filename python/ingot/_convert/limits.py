"""What a source may become, so that a small file does not fill a disk."""

from __future__ import annotations

import os
from itertools import islice

from ingot.errors import OptionError

from .refusal import refused

# A source may always become as much as this, in bytes.
ALWAYS_NBYTES = 1 << 30
# And as many times its own size. Weights compress to a half; masks and tables of zeros to a hundredth.
GROWTH = 100

# Files of a folder that are counted: checkpoints have fewer.
_MOST_FILES = 10_000


def source_nbytes(path: str, is_folder: bool) -> int:
    """The bytes of a source: of one file, or of all in its folder, where its tensors may be in these."""
    if not is_folder:
        return os.stat(path).st_size
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
    return sum(os.stat(file).st_size for file in islice(files, _MOST_FILES) if os.path.isfile(file))


def max_nbytes_of(source_nbytes: int, asked: int | None) -> int:
    """The most bytes of tensors that a source of that size may hold."""
    if asked is None:
        return max(ALWAYS_NBYTES, GROWTH * source_nbytes)
    if isinstance(asked, bool) or not hasattr(asked, "__index__"):
        raise TypeError(f"max_nbytes must be an int, found {type(asked).__name__}")
    if asked < 0:
        raise OptionError(f"max_nbytes must be 0 or more, found {asked}", code="max-nbytes", found=asked)
    return asked


def check_total(path: str, total: int, limit: int) -> None:
    """Refuse what is too much, naming the limit."""
    if total > limit:
        raise refused(
            path,
            f"holds {total:,} bytes when it is unpacked, and the limit is {limit:,} "
            f"({GROWTH} times the size of the file, or 1 GiB where that is more) — "
            f"max_nbytes={total} admits it",
            code="too-large",
            expected=limit,
            found=total,
        )
