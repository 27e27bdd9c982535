"""Files that are written: to a path, now or in the background, or to an object with a `write`."""

from __future__ import annotations

import json
from errno import EAGAIN
from io import FileIO
from math import prod
from os import fsdecode, getcwd
from os.path import join
from typing import Any, NamedTuple, TypeVar

from . import _native
from ._frameworks import payload
from ._options import Saving, checked_progress, format_for, known_format, named, texts
from ._text import _escaped
from .errors import StorageError
from .typing import SaveOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from typing import Protocol

    from ._native import Export
    from .typing import Format, Path, Tell

    class Writable(Protocol):
        """What has a `write` for bytes: files, sockets' files, `io.BytesIO`, members of archives, uploads."""

        def write(self, data: Any, /) -> object:
            """Take bytes, and say how many."""

    Payload = Callable[[str, Any], Any]

    # For each name that is not stored, the name of the tensor that it shares, and which part of that.
    Views = dict[str, dict[str, Any]]


Function = TypeVar("Function", bound="Callable[..., Any]")


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


def write_file(
    filename: Path,
    tensors: dict[str, Any],
    payload: Payload,
    metadata: Mapping[str, str] | None,
    options: SaveOptions,
    *,
    export: Export | None = None,
    shared: str = "copy",
    views: str | None = None,
    background: bool = False,
) -> Future[None] | None:
    """Write a file. The end of every function that does, with tensors of whatever framework.

    Parameters
    ----------
    filename, metadata
        As for `serialize_file`.
    tensors : dict of str to tensor
        As `named` gives it.
    payload, export, shared, views
        As for `_native.prepare`: how the tensors are handed over, and what of those that share memory.
    options : dict
        As callers gave them.
    background : bool
        As for `ingot.numpy.save_file`.
    """
    how = Saving.of(options)
    path = _native.local_path(filename)
    write = _writer(checked_progress(how.progress), path)
    file = _native.prepare(
        # Where a relative path leads now, and not when its turn comes.
        join(getcwd(), fsdecode(path)) if background else path,
        tensors,
        payload,
        texts(metadata),
        format_for(path, how.format),
        export=export,
        shared=shared,
        views=views,
        **how.of_file(),
    )
    # What is left of the tensors is in `file`.
    del tensors, payload, export
    if not background:
        return write(file)
    if how.snapshot:
        file.snapshot()
    from ._background import SAVES

    return SAVES.put(lambda: write(file))


# What stands for the options in a docstring.
_IN_DOCS = "**options\n    How the file is written: `ingot.typing.SaveOptions`."


def takes_save_options(function: Function) -> Function:
    """`function` with each option of saving in its signature and its docstring, for its ``**options``.

    So an option is documented once, in `SaveOptions`, for all functions that end in `write_file`.
    """
    # Imported here: frameworks have imported it, and the rest of this package does without.
    from inspect import Parameter, cleandoc, signature

    shown = signature(function)
    own = [one for one in shown.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=default,
            annotation=SaveOptions.__annotations__[name].__forward_arg__,
        )
        for name, default in Saving._field_defaults.items()
    ]
    whole: Any = function
    whole.__signature__ = shown.replace(parameters=own + options)
    # Without docstrings where Python was told to leave them out.
    _, _, documented = cleandoc(SaveOptions.__doc__ or "").partition("\n----------\n")
    whole.__doc__ = cleandoc(function.__doc__ or "").replace(_IN_DOCS, documented)
    return function


def _writer(progress: bool | Tell, path: str | bytes) -> Callable[[_native.NewFile], None]:
    """What writes a file and tells `progress`. Imported when asked for, since few programs need it."""
    if progress is False:
        return _native.NewFile.write
    from ._progress import telling

    def write(file: _native.NewFile) -> None:
        with telling(progress, "Saving", path) as tell:
            file.write(tell)

    return write


class Storage(FileIO):
    """A file for bytes, whose failure is a `StorageError` with its path.

    To be written through a buffer, which calls again for what was not taken at once.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            path = str(self.name)
            raise StorageError(
                f"{_escaped(path)}: could not write: {fault.strerror}",
                errno=fault.errno,
                code="write",
                path=path,
            ) from fault


def rendered(views: Views) -> str | None:
    """The record of these names; None where there are none. FORMAT.md, "Shared tensors"."""
    return json.dumps(views, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if views else None


class Box(NamedTuple):
    """A part of a tensor, and what of it is meant.

    Attributes
    ----------
    starts, sizes : tuple of int
        Where it begins and how much it takes, of each dimension.
    within : slice
        The elements that are meant, among those of the part in C order.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    within: slice

    @property
    def slices(self) -> tuple[slice, ...]:
        """What the tensor is indexed with."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The elements from `begin` to `end` in C order: one box or two, of at most three times as many elements.

    The number of rows in a box depends on the number of elements alone, not on where they begin: jax compiles
    anew for every other size.
    """
    if not shape:
        return [Box((), (), slice(begin, end))]
    row, count = prod(shape[1:]), end - begin
    if count < row:
        # In one row, or across the border of two.
        border = min((begin // row + 1) * row, end)
        parts = [(begin, border), (border, end)]
        return [box for part in parts if part[0] < part[1] for box in _in_a_row(shape, row, *part)]
    rows = min((count + row - 2) // row + 1, shape[0])
    first = min(begin // row, shape[0] - rows)
    skipped = begin - first * row
    return [Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]), slice(skipped, skipped + count))]


def _in_a_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Box]:
    number = begin // row
    inner = boxes(shape[1:], begin - number * row, end - number * row)
    return [Box((number, *box.starts), (1, *box.sizes), box.within) for box in inner]
