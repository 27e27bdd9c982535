"""Patches: what changed between two versions of a checkpoint.

A patch has the new values of the elements whose bits changed, and their positions. It is a ``.safetensors``
file (FORMAT.md, "Patches"), and takes about 3 % of a checkpoint in bf16 if 2 % of the elements changed, as
from step to step of reinforcement learning.

>>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors", step=7)
>>> ingot.delta.apply("model.safetensors", "patch.safetensors", "result.safetensors")
True
>>> ingot.hash("result.safetensors") == ingot.hash("tuned.safetensors")
True
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

from . import _native
from ._base.checks import counted, format_for
from ._base.options import Loading, Saving, argument, checked, takes
from ._base.progress import Several, reporting_on
from ._base.report import Report
from ._base.text import _escaped
from ._native import Checkpoint, Patch, is_url, local_path
from ._read.door import open_checkpoint
from ._write.shards import Place, aside
from .errors import OptionError
from .typing import CastOptions, HeaderOptions, Path, Source

__all__ = ["ChangedTensor", "Delta", "Item", "apply", "compose", "diff", "info", "items"]

# The largest index that a reader accepts (FORMAT.md, I1).
_INDEX_NBYTES = 250_000_000
_RARE = ("replace_read_only",)


class ChangedTensor(NamedTuple):
    """A tensor of a patch.

    Attributes
    ----------
    dtype : str
        The dtype in the header of the result.
    shape : tuple of int
        The shape in the result.
    codec : str
        ``"whole"`` if the patch has all elements; ``"gaps"`` or ``"runs"`` if it has positions and values of
        some.
    changed : int
        The number of elements whose values the patch has. Of packed dtypes (F4, F6), the number of bytes.
    nbytes : int
        Bytes in the patch.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors")
    >>> ingot.delta.info("patch.safetensors").tensors["wte"]
    ChangedTensor(dtype='F32', shape=(8, 4), codec='whole', changed=32, nbytes=128)
    """

    dtype: str
    shape: tuple[int, ...]
    codec: str
    changed: int
    nbytes: int


class Item(NamedTuple):
    """New values of one tensor, as `items` yields them.

    Attributes
    ----------
    name : str
        The name of the tensor.
    dtype : str
        Its dtype in the header.
    shape : tuple of int
        Its shape.
    begin : int
        The first element of the part of the tensor that this item is about.
    positions : memoryview or None
        The positions of the changed elements in the flattened tensor, sorted, as 64-bit integers. None if all
        elements from `begin` on have new values. Of packed dtypes (F4, F6), positions of bytes.
    values : memoryview
        The bytes of the new elements, in the order of their positions.

    Examples
    --------
    >>> from ingot.numpy import load_file, save_file
    >>> tensors = load_file("model.safetensors")
    >>> tensors["wte"][0, 1:3] = 5
    >>> save_file(tensors, "changed.safetensors")
    >>> ingot.delta.diff("model.safetensors", "changed.safetensors", "patch.safetensors")
    >>> [item] = ingot.delta.items("patch.safetensors")
    >>> item.name, item.positions.tolist(), numpy.frombuffer(item.values, "float32").tolist()
    ('wte', [1, 2], [5.0, 5.0])
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    positions: memoryview | None
    values: memoryview


@dataclass(frozen=True, slots=True, repr=False)
class Delta(Report):
    """The description of a patch. `info` returns one.

    Attributes
    ----------
    id : str
        The id of the patch, which covers all its bytes.
    base, result : str
        The ids of the versions before and after the patch: digests of the headers, and of the data too if the
        headers lack digests of some tensors.
    base_digest, result_digest : str
        The digests of the data of these versions.
    step : int or None
        The step of the training that made the result.
    tensors : dict of str to ChangedTensor
        The tensors with new values, by name.
    added, removed : list of str
        Names of tensors that only the result has, and that only the base has.
    files : list of str
        The names of the files of the result. Empty if the result is one file without an index.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors", step=7)
    >>> patch = ingot.delta.info("patch.safetensors")
    >>> patch.step, patch.tensors["wte"].codec, patch.added
    (7, 'whole', [])
    """

    _path = "delta.Delta"

    id: str
    base: str
    result: str
    base_digest: str
    result_digest: str
    step: int | None
    tensors: dict[str, ChangedTensor]
    added: list[str]
    removed: list[str]
    files: list[str]


@takes(CastOptions, rare=_RARE)
def diff(
    source: Source,
    other: Source,
    destination: Path,
    *,
    step: int | None = None,
    **options: Unpack[CastOptions],
) -> None:
    """Write the patch that makes `other` of `source`.

    Tensors are compared by their bits, so that a NaN differs from another NaN and 0.0 from -0.0. The patch
    has the smallest form of the changes of each tensor, and one pair of versions makes one patch, byte for
    byte. Both versions are read once, in parallel, with little memory.

    Parameters
    ----------
    source : ingot.typing.Source
        The base: a file, a sharded checkpoint, a URL, an open file or a buffer, as for `ingot.open`.
    other : ingot.typing.Source
        The new version, likewise. Tensors may be added or removed, or have other dtypes or shapes.
    destination : str, bytes or os.PathLike
        Where to write the patch, a ``.safetensors`` file. An existing file stays until the patch is complete.
    step : int, optional
        The step of the training that made the new version, for `info`.
    **options
        How both are read and the patch is written.

    Raises
    ------
    OSError, HeaderError, CheckpointError, StorageError
        As for `ingot.open` and `save_file`. A file that changes during the call is an error.
    IntegrityError
        Both versions have the same header with digests of all tensors, and the data of one of them is corrupt
        (``code`` is ``"digest-mismatch"``). Nothing was written.
    TypeError, OptionError
        An argument has a wrong type or value, or `destination` ends with ``.bt`` (``code`` is
        ``"patch-name"``).

    Notes
    -----
    The ids of the versions are digests of their headers if these have digests of the tensors
    (``save_file(..., checksums="xxh3")``), so `apply` finds out without reading the tensors whether a file is
    the base. Otherwise the ids are digests of headers and tensors, and `apply` reads both.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors")
    """
    given = checked(diff, locals(), destination=_patch_path, step=partial(counted, "step", or_none=True))
    how, saving = Loading.among(given), Saving.among(diff, given)
    base, new = given["source"], given["other"]
    with (
        closing(_opened(base, how)) as old,
        closing(_opened(new, how)) as result,
        reporting_on(how.progress, "Comparing", result.path or "") as tell,
    ):
        _native.diff_versions(
            old,
            result,
            given["destination"],
            index=_index(new, result, how),
            step=given["step"],
            threads=how.threads,
            progress=tell,
            **saving.of_named_file(),
        )


@takes(CastOptions, rare=_RARE)
def apply(
    source: Source,
    patch: Source,
    destination: Path | None = None,
    *,
    in_place: bool = False,
    verify: bool = False,
    **options: Unpack[CastOptions],
) -> bool:
    """Make the new version of `source` with a patch.

    The result is the new version that `diff` read, byte for byte. The patch is checked before anything is
    written: its digests, its positions, and whether `source` is the version that it is for.

    Parameters
    ----------
    source : ingot.typing.Source
        The base. With `in_place`, the path of a file, or of a directory or index of shards.
    patch : ingot.typing.Source
        The patch: a file, a URL, an open file or a buffer.
    destination : str, bytes or os.PathLike, optional
        Where to write the result: a file, or a directory if the result has several files. It may be `source`.
        An existing file stays until the result is complete.
    in_place : bool
        Change the files of `source`: only pages with changes are written. All tensors must keep their dtype,
        shape and position.
    verify : bool
        Compare the digest of all data of `source` too. By default its id is compared. To find the id, the
        data is read only if the headers lack digests of some tensors.
    **options
        How files are read and written.

    Returns
    -------
    bool
        False if `source` was the result already, which only `in_place` allows; True otherwise.

    Raises
    ------
    IntegrityError
        The patch is for another version (``code`` is ``"wrong-base"``), is no patch or contradicts itself
        (``"invalid-patch"``), has changed since it was written (``"digest-mismatch"``), or has a later
        version (``"later-patch"``). Nothing was written.
    SaveError
        The files cannot be changed in place (``"not-in-place"``). Nothing was written.
    StorageError
        Another patch was begun in place and not finished (``"unfinished-patch"``); the message names it. Or
        this patch was, and a file was replaced since (``"replaced-file"``). Or writing failed.
    OptionError
        Neither `destination` nor `in_place` was passed, or both.
    OSError, HeaderError, CheckpointError, TypeError
        As for `ingot.open` and `save_file`.

    Notes
    -----
    In place, the patch is the redo log. The beginning of each file is replaced by a mark that names the
    patch, then the tensors are changed, and then the new header replaces the mark, with a flush after each
    step. ``durable=False`` leaves out the last flush. A process that is killed meanwhile, or a power cut,
    leaves files that no reader accepts, and the next call with the same patch finishes them: keep the patch
    until then. That call compares all data with the digest of the result before it restores the headers.
    Calls at the same time wait for each other. Programs that have mapped the file see the bytes change.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors")
    >>> ingot.delta.apply("model.safetensors", "patch.safetensors", in_place=True)
    True
    >>> ingot.delta.apply("model.safetensors", "patch.safetensors", in_place=True)
    False
    """
    given = checked(apply, locals())
    if destination is not None:
        given["destination"] = argument(apply, "destination", destination, local_path)
    how, saving = Loading.among(given), Saving.among(apply, given)
    if in_place == (destination is not None):
        found = "both" if in_place else "neither"
        message = f"apply(): expected destination or in_place=True, found {found}"
        raise OptionError(message, code="destination-or-in-place", found=found)
    if in_place:
        path = argument(apply, "source", given["source"], local_path)
        with reporting_on(how.progress, "Patching", path) as tell:
            opened = _patch(given["patch"], how, prove=True)
            return opened.apply_in_place(
                path, verify, durable=saving.flush, threads=how.threads, progress=tell
            )
    opened = _patch(given["patch"], how, prove=True)
    with (
        closing(_opened(given["source"], how)) as base,
        reporting_on(how.progress, "Patching", given["destination"]) as tell,
    ):
        opened.check_base(base, verify, threads=how.threads)
        _write(opened, base, given["destination"], saving, tell)
    return True


def _write(patch: Patch, base: Checkpoint, destination: Any, how: Saving, tell: Any) -> None:
    """Write the result: a file, or a directory of files and an index."""
    record = patch.record()
    index = patch.index()
    if index is None:
        patch.apply(base, 0, destination, progress=tell, **how.of_named_file())
        return
    place = Place.of_index(destination, record["index"], record["files"])
    place.check(how.existing)
    steps = Several(tell, sum(record["nbytes"]))
    new = {**how.of_named_file(), "overwrite": True}
    with aside(place, record["files"], index, how) as paths:
        for number, (path, nbytes) in enumerate(zip(paths.values(), record["nbytes"], strict=True)):
            patch.apply(base, number, path, progress=steps.step(nbytes), **new)


@takes(CastOptions, rare=_RARE)
def compose(sources: Iterable[Source], destination: Path, **options: Unpack[CastOptions]) -> None:
    """Write one patch that does what several patches do in a row.

    Parameters
    ----------
    sources : iterable of ingot.typing.Source
        The patches in their order: each is for the result of the one before.
    destination : str, bytes or os.PathLike
        Where to write the patch, a ``.safetensors`` file. An existing file stays until the patch is complete.
    **options
        How the patches are read and the new one is written.

    Raises
    ------
    IntegrityError
        A patch is not for the result of the one before (``code`` is ``"wrong-base"``), or is not intact, as
        for `apply`. Nothing was written.
    OSError, HeaderError, StorageError, TypeError, OptionError
        As for `diff`.

    Notes
    -----
    No version is read, so an element that changes and changes back stays in the patch.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "1.safetensors")
    >>> ingot.delta.diff("tuned.safetensors", "model.safetensors", "2.safetensors")
    >>> ingot.delta.compose(["1.safetensors", "2.safetensors"], "both.safetensors")
    >>> patch = ingot.delta.info("both.safetensors")
    >>> patch.base_digest == patch.result_digest
    True
    """
    given = checked(compose, locals(), destination=_patch_path)
    how, saving = Loading.among(given), Saving.among(compose, given)
    # There may be more patches than a process may have open files.
    patches = [_patch(source, how, prove=True, lent=True) for source in given["sources"]]
    with reporting_on(how.progress, "Composing", given["destination"]) as tell:
        _native.compose_patches(patches, given["destination"], progress=tell, **saving.of_named_file())


@takes(HeaderOptions)
def info(source: Source, **options: Unpack[HeaderOptions]) -> Delta:
    """Describe a patch. Its positions and values are not read.

    Parameters
    ----------
    source : ingot.typing.Source
        The patch: a file, a URL, an open file or a buffer.
    **options
        How the header is read.

    Returns
    -------
    Delta

    Raises
    ------
    IntegrityError
        The file is no patch (``code`` is ``"invalid-patch"``), or one of a later version (``"later-patch"``).
    OSError, HeaderError, StorageError, TypeError, OptionError
        As for `ingot.open`.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors", step=7)
    >>> ingot.delta.info("patch.safetensors").step
    7
    """
    given = checked(info, locals())
    patch = _patch(given["source"], Loading.among(given), prove=False)
    record = patch.record()
    return Delta(
        id=record["id"],
        base=record["base"][0],
        result=record["result"][0],
        base_digest=record["base"][1],
        result_digest=record["result"][1],
        step=record["step"],
        tensors={
            entry.name: ChangedTensor(entry.dtype, entry.shape, codec, changed, nbytes)
            for entry, codec, changed, nbytes in patch.changed()
        },
        added=record["added"],
        removed=record["removed"],
        files=record["files"],
    )


@takes(HeaderOptions)
def items(source: Source, *, max_nbytes: int = 16 << 20, **options: Unpack[HeaderOptions]) -> Iterator[Item]:
    """Iterate over the changes of a patch, to send them elsewhere or to apply them to tensors in memory.

    Parameters
    ----------
    source : ingot.typing.Source
        The patch: a file, a URL, an open file or a buffer. It is checked as for `apply`, before the first
        item.
    max_nbytes : int
        Each item is about a part of a tensor of at most this many bytes, so that memory is bounded.
    **options
        How the patch is read.

    Yields
    ------
    Item
        The changes of a part of a tensor, in the order of the names and of the elements.

    Raises
    ------
    IntegrityError
        The patch is not intact, as for `apply`.
    OSError, HeaderError, StorageError, TypeError, OptionError
        As for `ingot.open`.

    Examples
    --------
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors")
    >>> [item.name for item in ingot.delta.items("patch.safetensors")]
    ['lm_head.weight', 'wte']
    """
    given = checked(items, locals(), max_nbytes=partial(counted, "max_nbytes", least=1))
    patch = _patch(given["source"], Loading.among(given), prove=True)
    return _items(patch, given["max_nbytes"])


def _items(patch: Patch, max_nbytes: int) -> Iterator[Item]:
    for entry, codec, *_ in patch.changed():
        # Positions of packed dtypes count bytes.
        total = entry.nbytes
        width = 1 if entry.dtype.startswith(("F4", "F6")) else max(total // max(entry.parameter_count, 1), 1)
        step = max(max_nbytes // width, 1)
        for begin in range(0, max(total // width, 1), step):
            positions, values = patch.elements(entry.name, begin, begin + step)
            if codec == "whole":
                yield Item(entry.name, entry.dtype, entry.shape, begin, None, memoryview(values))
            elif values:
                found = memoryview(positions).cast("q")
                yield Item(entry.name, entry.dtype, entry.shape, begin, found, memoryview(values))


def _patch_path(destination: Any) -> str | bytes:
    """Return the path of a patch to write, which has no ending of another format."""
    path = local_path(destination)
    if format_for(path, None) != "safetensors":
        found = os.fsdecode(path)
        message = f"{_escaped(found)}: a patch is a .safetensors file: expected a name without .bt"
        raise OptionError(message, code="patch-name", path=found)
    return path


def _opened(source: Any, how: Loading) -> Checkpoint:
    # Never mapped: if another process shortens a file, reading it returns an error.
    return open_checkpoint(source, how._replace(backend="pread" if how.backend == "auto" else how.backend))


def _patch(source: Any, how: Loading, *, prove: bool, lent: bool = False) -> Patch:
    return Patch(open_checkpoint(source, how._replace(backend="pread"), lent=lent), prove)


def _index(source: Any, opened: Checkpoint, how: Loading) -> bytes | None:
    """Return the text of the index of a checkpoint; None for a single file."""
    path = opened.path
    if path is None or path in opened.shards:
        return None
    if is_url(path):
        storage: Mapping[str, Any] | None = how.storage_options
        url = source if isinstance(source, str) else path
        name = os.path.basename(path)
        return _native.fetch_beside(url, name, _INDEX_NBYTES, storage)[1]
    with open(opened.at or path, "rb") as file:
        return file.read()


def __dir__() -> list[str]:
    return __all__
