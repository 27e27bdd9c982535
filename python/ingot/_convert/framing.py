"""Whether a file is of a format of this package, by all of its framing.

Files of these formats begin with a number, the length of the header. It may spell what any other format
begins with, so they are asked for first, and of the first bytes alone nothing is concluded.
"""

from __future__ import annotations

from ingot import _native
from ingot.errors import HeaderError

# The longest header.
_MAX_HEADER_NBYTES = 100_000_000


def proven(path: str) -> str:
    """The format, if the header keeps all its rules. Else `HeaderError`."""
    if path.endswith(".json"):
        # Of that name every function of this package takes it for an index, whatever it is.
        raise HeaderError(
            "no index of a checkpoint, as which it would be read by its name", code="index-name"
        )
    checkpoint = _native.Checkpoint.open(path, "pread")
    try:
        return checkpoint.format
    finally:
        checkpoint.close()


def begun(path: str, head: bytes) -> str | None:
    """The format that a file with this begin was to be, where its header is broken.

    No other format has so small a number there, unless it is made to: its fifth to eighth byte are zero.
    """
    if len(head) < 8 or not 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_NBYTES:
        return None
    if head[8:].lstrip()[:1] == b"{" or path.lower().endswith(".safetensors"):
        return "safetensors"
    return "bintensors" if path.lower().endswith(".bt") else None


def is_ours(path: str) -> bool:
    """Whether it is a file of this package, even a broken one."""
    try:
        proven(path)
    except HeaderError:
        with open(path, "rb") as file:
            return begun(path, file.read(512)) is not None
    return True
