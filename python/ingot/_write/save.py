"""Saves to files by name, now or in the background, and to objects with a `write`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from errno import EAGAIN
from math import prod
from os import PathLike, fsdecode, getcwd
from os.path import join
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ingot import _native
from ingot._base.checks import format_for, is_writable
from ingot._base.options import Saving
from ingot._base.text import _escaped, _quoted
from ingot._native import SHARED_KEY, NewFile
from ingot.errors import StorageError
from ingot.typing import Path, Tell, Writable

from .failures import warn as warn_of_failures

if TYPE_CHECKING:
    from .background import SaveFuture


Payload = Callable[[str, Any], Any]
Tensors = dict[str, Any]
Copies = Callable[[Tensors], Tensors]

# For each alias, the name of the stored tensor and the part of it.
Views = dict[str, dict[str, Any]]

T = TypeVar("T")


def write_file(
    filename: Path | Writable,
    tensors: Tensors,
    payload: Payload,
    how: Saving,
    *,
    copies: Copies = dict,
    **exported: Any,
) -> SaveFuture | None:
    """Write a file. All functions that write a file of tensors end here.

    Parameters
    ----------
    filename : str, bytes, os.PathLike or Writable
        Where to write: a path, a URL of a store, or an object.
    tensors : dict of str to tensor
        The result of `named`.
    payload, **exported
        The arguments of `_native.prepare`: how the tensors are exported, and which share memory.
    how : Saving
        How the file is written.
    copies : callable
        Copies tensors on their devices, for ``snapshot="device"``. Tensors of most frameworks
        need none.
    """
    warn_of_failures()
    if is_writable(filename):
        how.check_writable(filename)
        _stream(filename, tensors, payload, how, **exported)
        return None
    path = _native.destination(filename)
    is_url = False
    if isinstance(path, str) and _native.is_url(path):
        is_url = True
        how.check_url(path)
    snapshot = how.snapshot_of()
    if how.background and not how.overwrite and not is_url:
        how.existing.check(fsdecode(path))
    if how.background and snapshot == "device":
        tensors = copies(tensors)
    # A relative path is resolved now, not when the save runs.
    place = join(getcwd(), fsdecode(path)) if how.background and not is_url else path
    file = new_file(place, tensors, payload, how, **exported)
    # What is left of the tensors is in `file`.
    del tensors, payload, exported
    shown = _native.shown_url(path) if isinstance(path, str) else path

    def save(write: Callable[..., None] = NewFile.write) -> None:
        reported(how.progress, "Saving", shown, write)(file)

    if not how.background:
        save()
        return None
    return put_later(save, fsdecode(shown), [file], snapshot)


def new_file(
    path: str | bytes, tensors: dict[str, Any], payload: Payload, how: Saving, **shown: Any
) -> NewFile:
    """Return a file that is not written yet. `shown` are the functions that export tensors."""
    options = {**shown, **how.layout(), **how.of_named_file(), "atomic": how.atomic}
    options["storage_options"] = how.storage_options
    return _native.prepare(path, tensors, payload, how.metadata, format_for(path, how.format), **options)


def put_later(
    save: Callable[[Callable[..., None]], None], path: str, files: Sequence[NewFile], snapshot: str | None
) -> SaveFuture:
    """Call `save` in the background, with the function that writes the last of `files`."""
    from .background import SAVES, SaveFuture

    future = SaveFuture(path)
    if snapshot == "host":
        for file in files:
            file.snapshot()
    if snapshot is not None:
        future._stage()

    def write(file: NewFile, tell: Tell | None = None) -> None:
        def report(done: int, total: int) -> None:
            if done == total:
                future._stage()
            if tell is not None:
                tell(done, total)

        file.write(report)

    return SAVES.put(lambda: save(write), future)


def reported(
    progress: bool | Tell, verb: str, path: str | bytes | PathLike[Any], work: Callable[..., T]
) -> Callable[..., T]:
    """Return `work`, with the function for its progress as the last argument if `progress` is not False."""
    if progress is False:
        return work
    # Imported here: few programs show progress.
    from ingot._base.progress import reporting_on

    def reporting(*given: Any) -> T:
        with reporting_on(progress, verb, path) as tell:
            return work(*given, tell)

    return reporting


def _stream(file: Writable, tensors: dict[str, Any], payload: Payload, how: Saving, **shown: Any) -> None:
    """Write the bytes of a file to `file`, a piece at a time. `shown` is how the tensors are exported."""
    name = getattr(file, "name", None)
    called = name if isinstance(name, str) else type(file).__name__
    write, format = _taking_all(file, called), how.format or "safetensors"

    def work(tell: Tell | None = None) -> None:
        _native.stream(write, tensors, payload, how.metadata, format, **shown, **how.layout(), progress=tell)

    reported(how.progress, "Saving", called, work)()


def _taking_all(file: Writable, called: str) -> Callable[[bytes], None]:
    """Return a function that calls ``file.write`` until all bytes are taken."""
    # Imported here: a program without such files need not have it.
    from io import RawIOBase, TextIOBase

    # A wrapper of a text file, as `tempfile` returns it, has the encoding of one.
    if isinstance(file, TextIOBase) or isinstance(getattr(file, "encoding", None), str):
        way_out = "open it with mode 'wb', or pass its `buffer`"
        raise TypeError(f"expected a binary file, found the text file {_quoted(called)}: {way_out}")
    raw = isinstance(file, RawIOBase)

    def write(piece: bytes) -> None:
        rest: bytes | memoryview = piece
        while rest:
            count = file.write(rest)
            if count is None and raw:
                raise BlockingIOError(EAGAIN, "the file does not block and is full", called)
            if not isinstance(count, int) or isinstance(count, bool):
                return
            if not 0 < count <= len(rest):
                message = f"{_escaped(called)}: write took {count} of {len(rest)} bytes"
                raise StorageError(message, code="write", expected=len(rest), found=count)
            rest = memoryview(rest)[count:]

    return write


def recorded(aliases: Mapping[str, tuple[str, Sequence[Any] | None]]) -> Views:
    """Return the parts of the aliases that `Checkpoint.shared` lists."""
    keys = ("shape", "stride", "begin")
    return {
        name: {"of": of, **dict(zip(keys, part or (), strict=False))} for name, (of, part) in aliases.items()
    }


def rendered(views: Views) -> dict[str, str]:
    """Return the record of these aliases by its key. Empty if there are none. FORMAT.md, "Shared tensors"."""
    if not views:
        return {}
    return {SHARED_KEY: json.dumps(views, sort_keys=True, separators=(",", ":"), ensure_ascii=False)}


class Box(NamedTuple):
    """A part of a tensor, and the range of elements in it.

    Attributes
    ----------
    starts, sizes : tuple of int
        The start and the length of the range, in each dimension.
    within : slice
        The selected elements of the part in C order.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    within: slice

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index into the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return one or two boxes that contain the elements from `begin` to `end` in C order.

    The number of rows in a box depends only on the number of elements, not on their position: jax compiles
    again for every other size.
    """
    if not shape:
        return [Box((), (), slice(begin, end))]
    if begin == end:
        return [Box((0,) * len(shape), (0,) * len(shape), slice(0, 0))]
    row, count = prod(shape[1:]), end - begin
    if count < row:
        # In one row, or across two rows.
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
