"""Files that are written to something other than a path."""

from __future__ import annotations

from errno import EAGAIN

from . import _native
from ._frameworks import payload
from ._serialize import known_format, named, texts
from .errors import StorageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from ._serialize import Format

    class Writable(Protocol):
        """What has a `write` for bytes: files, sockets' files, `io.BytesIO`, members of archives, uploads."""

        def write(self, data: Any, /) -> object:
            """Take bytes, and say how many."""


def write_to(
    fileobj: Writable,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
) -> None:
    """Write tensors to an object with a `write` method.

    Parameters
    ----------
    fileobj : object
        Its ``write`` is given bytes, 4 MiB or less at a time, one after the other. It may take fewer than it
        was given and say so by what it returns, as raw files do; None means all. It is neither flushed nor
        closed.
    tensors : dict of str to array or tensor
        Of any framework, of several too. Those that are not in C order are put in order piece by piece.
    metadata : dict of str to str, optional
        Text to store beside the tensors. What speaks of the tensors of another file is left out: digests,
        ``modelspec.hash_sha256``, names that share a tensor.
    format : {"safetensors", "bintensors"}
        What to write.

    Raises
    ------
    TypeError
        `fileobj` has no ``write`` or is a text file; a value is not a tensor; a name, a key or a value of the
        metadata is not a str.
    BlockingIOError
        `fileobj` is a raw file that does not block, and is full.
    StorageError
        Its ``write`` says that it took none of the bytes, or more than it was given.
    SaveError, OptionError
        As `save_file` does, and before anything is written.

    Notes
    -----
    Whatever ``write`` raises comes through; what it took until then, it has. The bytes are those of
    `save_file`. At most one piece is in memory beside the tensors.
    """
    _native.stream(
        _whole(fileobj),
        named(tensors, value="tensor"),
        payload,
        texts(metadata),
        known_format(format),
    )


def _whole(fileobj: Writable) -> Callable[[bytes], None]:
    """The `write` of `fileobj`, called again until it took everything."""
    # Imported here: a program without such files need not have it.
    from io import RawIOBase, TextIOBase

    if not callable(getattr(fileobj, "write", None)):
        raise TypeError(f"expected an object with a write method, found {type(fileobj).__name__}")
    if isinstance(fileobj, TextIOBase):
        raise TypeError("expected a binary file, found a text file: open it with mode 'wb'")
    raw = isinstance(fileobj, RawIOBase)

    def write(piece: bytes) -> None:
        rest: bytes | memoryview = piece
        while rest:
            count = fileobj.write(rest)
            if count is None and raw:
                raise BlockingIOError(EAGAIN, "the file does not block and is full")
            if not isinstance(count, int) or isinstance(count, bool):
                return
            if not 0 < count <= len(rest):
                raise StorageError(
                    f"write took {count} of {len(rest)} bytes", code="write", expected=len(rest), found=count
                )
            rest = memoryview(rest)[count:]

    return write
