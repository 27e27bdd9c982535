"""Edits of existing files: metadata, and single tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from os import fsdecode
from typing import Any, Literal, NamedTuple, Unpack

from ingot import _native
from ingot._base.checks import format_for, is_durable, texts
from ingot._base.frameworks import payload
from ingot._base.options import DEFAULT_LOADING, Loading, Saving, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report, reduced
from ingot._base.text import _escaped, _quoted, plural
from ingot._native import STATE_KEY, Sources
from ingot._read.door import open_checkpoint
from ingot.errors import HeaderError
from ingot.typing import EditOptions, Format, Path, RewriteOptions, Source

from .directory import locked
from .rearrange import Writing, opened, together
from .save import reported
from .states import Followed, follow, tensors_of


@takes(EditOptions)
def update_metadata(
    filename: Path,
    metadata: Mapping[str, str | None] | None,
    *,
    atomic: bool = False,
    **options: Unpack[EditOptions],
) -> Literal["unchanged", "in-place", "rewritten"]:
    """Change the metadata of a file. No tensor is read.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        The file, in either format. A symlink is followed.
    metadata : dict of str to str or None, or None
        Keys with their new values. None removes a key, which may be missing. Other keys keep their values.
    atomic : bool
        Always write a new file and rename it over the old one. If False, the file is changed in place if the
        conditions in the notes hold.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Returns
    -------
    {"unchanged", "in-place", "rewritten"}
        The kind of change. ``"rewritten"`` reserves at least 512 bytes for the next change.

    Raises
    ------
    TypeError
        A key is not a str, or a value neither a str nor None. The message names the key.
    OSError
        The file cannot be opened for reading and writing.
    HeaderError
        The file breaks a rule of its format.
    SafetensorError
        ``ingot.shared`` in `metadata` is not a record of names that share tensors of this file (``code`` is
        ``"invalid-alias"``). Nothing was touched.
    CheckpointError
        ``ingot.state`` in `metadata` is no training state of tensors of this file (``"invalid-state"``), or
        one of a later version of ingot (``"later-state"``). Nothing was touched.
    SaveError
        The header would be longer than 100,000,000 bytes. The file is unchanged.
    StorageError
        Writing failed; another process replaced the file during the call (``code`` is ``"overtaken"``), and
        the other file stays; or another edit held the lock of the file for a minute (``"locked"``).

    Notes
    -----
    The file is changed in place if the new metadata fits into the header's free space (``reserve_header`` of
    `save_file`, the spaces that an earlier change left, or the spaces at the end of a header) and all changed
    bytes are in one 4096-byte page of the file. One write then changes them, and the system copies it as a
    whole. A file with other hard links, or in the Hugging Face cache, is never changed in place. The
    consequences:

    - A process that is killed, at any moment, leaves the old file or the new one.
    - A reader that reads the header before or after the write sees all of the old or of the new metadata.
      During the microsecond of the copy, some file systems (ext4, tmpfs, not XFS) let a reader see some old
      and some new bytes: a value that is part old, part new, or a header that is refused. This happened in 2
      of 28,000 reads while another process edited without pause. Names, shapes and data are never affected.
      ``atomic=True`` avoids it.
    - Loss of power leaves the old or the new page if the disk writes blocks of 4096 bytes as a whole, as
      those with physical sectors of that size do. ``atomic=True`` does not depend on it.
    - Handles that were open before detect the write by the time of modification, and then raise
      `StorageError` (``code`` is ``"changed"``) for tensors. Tensors that were loaded before stay valid.

    Otherwise a new file is written beside the old one and renamed over it, with the guarantees of
    `save_file`: mode, owner and symlinks are kept, and readers see all of the old file or all of the new one.
    The files share their data if the file system can (reflinks on XFS and Btrfs); otherwise the kernel copies
    it.

    Signatures of the whole file (``c2pa:manifest``, ``c2pa:manifest.uri``, ``__signature__``, ``sigstore``)
    are removed, since the change breaks them, unless `metadata` has them or nothing else changes.

    Concurrent changes, in any number of processes, wait for each other (``flock``), and none is lost.

    Examples
    --------
    >>> ingot.update_metadata("model.safetensors", {"title": "Tiny", "format": None})
    'in-place'
    >>> ingot.inspect("model.safetensors").metadata
    {'title': 'Tiny'}
    """
    given = checked(update_metadata, locals(), metadata=_changes)
    new, gone = given["metadata"]
    _check_state(filename, new)
    update = reported(given.get("progress", False), "Writing", filename, _native.update_metadata)
    return update(filename, new, gone, not atomic, is_durable(given.get("durable")))


def _check_state(filename: Path, metadata: Mapping[str, str]) -> None:
    """Raise if `metadata` has a training state that names tensors which the file lacks."""
    if STATE_KEY in metadata:
        with closing(open_checkpoint(_native.local_path(filename), Loading("pread"))) as checkpoint:
            tensors_of(checkpoint, metadata[STATE_KEY])


def _changes(metadata: Any) -> tuple[dict[str, str], list[str]]:
    """Return the pairs to set, and the keys to remove."""
    given = dict(metadata) if hasattr(metadata, "keys") else {}
    gone = [key for key, value in given.items() if value is None]
    # The keys without values are checked too.
    new = texts({**given, **dict.fromkeys(gone, "")} if given else metadata) or {}
    return {key: new[key] for key, value in given.items() if value is not None}, gone


@takes(EditOptions)
def replace_tensor(filename: Path, name: str, tensor: Any, **options: Unpack[EditOptions]) -> None:
    """Replace the values of one tensor of a file. All other bytes stay unchanged.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        The file, in either format. A symlink is followed.
    name : str
        The tensor, by any of its names. Aliases (``save_file(..., shared="alias")``) stay aliases of the
        tensor, and aliases of its parts show parts of the new values.
    tensor : array or tensor of any framework
        The new values, with the dtype and the shape in the header.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Raises
    ------
    TensorNotFoundError
        There is no such tensor.
    SaveError
        Dtype or shape differ (``code`` is ``"mismatch"``), or the tensor has no values.
    SafetensorError
        The name is an alias of a part of a stored tensor (``"invalid-alias"``). The message names the tensor.
    OSError, HeaderError, StorageError
        As for `update_metadata`.

    Notes
    -----
    This always makes a new file and renames it over the old one, with the guarantees of `save_file`. Writing
    into the old file would not be atomic: after a kill, or for a concurrent reader, the tensor could have
    some old and some new values. The other tensors are shared with the old file or copied by the kernel, as
    for `update_metadata`.

    Examples
    --------
    >>> ingot.replace_tensor("model.safetensors", "wte", numpy.zeros((8, 4), "float32"))
    """
    how = Saving.of(replace_tensor, locals())
    replace = reported(how.progress, "Writing", filename, _native.replace_tensor)
    replace(filename, name, tensor, payload, how.flush)


def update_index(path: str, metadata: Mapping[str, str | None]) -> None:
    """Change the metadata of an index as `update_metadata` does. The rest of it stays."""
    # This refuses an index that breaks a rule.
    _native.ShardIndex.read(path)
    with locked(os.path.dirname(os.path.realpath(path))):
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        pairs = {**(index.get("metadata") or {}), **metadata}
        index["metadata"] = {key: value for key, value in pairs.items() if metadata.get(key, "") is not None}
        text = json.dumps(index, indent=2)
        _native.replace_file(path, [text.encode()], overwrite=True, durable=is_durable(None))


# The repair of broken files.


class Finding(NamedTuple):
    """A rule that a file breaks, and the action of `repair`."""

    #: The code of the rule (FORMAT.md), such as ``"trailing-bytes"``.
    code: str
    #: The tensor with the fault; None for the file.
    tensor: str | None
    #: The fault, as a sentence.
    found: str
    #: The remedy, a value of the table in `repair`.
    done: str

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, repr=False)
class Repair(Report):
    """The result of `ingot.repair`.

    Attributes
    ----------
    source, destination : str
        The source, and the destination.
    format : str
        The format of the new file: ``"safetensors"`` or ``"bintensors"``.
    tensors : int
        How many it has.
    nbytes : int
        Bytes of their values.
    findings : tuple of Finding
        The broken rules, each with ``code``, ``tensor``, ``found`` and ``done``. Empty if the source breaks
        no rule; the new file then holds the same.

    Examples
    --------
    >>> with open("model.safetensors", "ab") as file:
    ...     size = file.write(b"trailing")
    >>> report = ingot.repair("model.safetensors", "repaired.safetensors")
    >>> report.tensors, [finding.code for finding in report.findings]
    (2, ['trailing-bytes'])
    """

    source: str
    destination: str
    format: str
    tensors: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the tensors that the new file lacks."""
        return tuple(finding.tensor or "" for finding in self.findings if finding.done == "tensor-left-out")


@takes(RewriteOptions)
def repair(
    source: Source, destination: Path, *, format: Format | None = None, **options: Unpack[RewriteOptions]
) -> Repair:
    """Write the valid tensors of a broken file to a new file, and report each change.

    The new file holds the tensors that ``ingot.safe_open(source, framework, lenient=True)`` finds. Their
    bytes are copied unchanged, with less than 64 MiB of memory beside the header. Nothing is guessed: a
    tensor whose dtype, shape or bytes are in doubt is left out.

    Parameters
    ----------
    source : ingot.typing.Source
        The file, in either format, as for `ingot.open`. All shards of a sharded checkpoint, whose index must
        be valid, become one file.
    destination : str, bytes or os.PathLike
        Where to write; it may be `source`. An existing file stays until the new file is complete.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`: by default the suffix of `destination` decides.
    **options
        How headers are read and the file is written: `ingot.typing.RewriteOptions`.

    Returns
    -------
    Repair
        The findings. ``done`` is one of:

        ``"tensor-left-out"``
            The tensor is truncated, shares bytes with another, has an unknown dtype, an entry that cannot be
            read, the name of another tensor, or a size that does not match its shape. One of two equal
            entries is kept, and the first of two names for one tensor.
        ``"bytes-left-out"``
            Bytes between the tensors or after the last one that belong to no tensor were dropped.
        ``"made-text"``
            A metadata value that is not text was kept as JSON. Bytes of the header that are not UTF-8 become
            U+FFFD.
        ``"last-kept"``
            The last of several values for one metadata key was kept, as other readers do.
        ``"value-left-out"``
            Metadata that is not an object, or a broken record of ingot's own, was dropped. A training state
            is broken if it names a tensor that is left out.
        ``"rewritten"``
            A harmless deviation was corrected: padding, unknown fields, the order of the entries.

    Raises
    ------
    FileExistsError
        The destination exists, and `overwrite` is not set.
    HeaderError
        The file cannot be read at all: the length of the header is wrong, the header is not JSON, or the file
        has another format. Or the file has tensors, but none of them is sound.
    SaveError
        The format lacks a dtype, or has no room for a name.
    OSError, CheckpointError, StorageError, TypeError, OptionError
        As for `merge`.

    Notes
    -----
    By default the source's digests of tensors are copied and not compared: use `ingot.verify` on the new
    file. ``modelspec.hash_sha256`` is kept if all data is the same, as for `merge`. Aliases of a tensor are
    kept with it, and left out with it.

    Examples
    --------
    >>> ingot.repair("model.safetensors", "repaired.safetensors").findings
    ()
    """
    given = checked(repair, locals())
    how = Saving.among(repair, given)
    new: str | bytes = given["destination"]
    held, findings = _examined(source, Loading.among(given))
    with reporting_on(how.progress, "Repairing", new) as tell:
        picks, pairs, _ = _sound(held)
        Writing(how, is_inherited=True).write(held, new, picks, pairs, tell)
    return _report(held, findings, new, format)


def planned(source: Source, destination: Path) -> Repair:
    """Return the result of `repair`, without writing."""
    return _report(*_examined(source, DEFAULT_LOADING), _native.local_path(destination), None)


def _report(
    held: Sources, findings: tuple[Finding, ...], destination: str | bytes, format: Format | None
) -> Repair:
    sizes = held.sizes(0)
    kind = format_for(destination, format)
    return Repair(held.path(0), fsdecode(destination), kind, len(sizes), sum(sizes), findings)


def _examined(source: Source, how: Loading) -> tuple[Sources, tuple[Finding, ...]]:
    """Return the sound tensors of a file, and the rules that it breaks.

    Raises
    ------
    HeaderError
        The file has tensors, but none of them is sound.
    """
    held = opened([source], how, "salvage")
    path = held.path(0)
    rows = held.findings(0)
    findings = tuple(
        Finding(code, tensor, _of(path, tensor, found), done) for code, tensor, found, done in rows
    )
    if _sound(held).is_lost:
        reason = f"{STATE_KEY} in the metadata is invalid, or names a tensor that is left out"
        findings = (*findings, Finding("invalid-state", None, reason, "value-left-out"))
    left_out = [finding for finding in findings if finding.done == "tensor-left-out"]
    if left_out and not held.names(0):
        first = left_out[0]
        message = (
            f"{_escaped(path)}: none of {plural(len(left_out), 'tensor')} is sound: tensor "
            f"{_quoted(first.tensor)}: {first.found}"
        )
        raise HeaderError(message, code=first.code, path=path, tensor=first.tensor)
    return held, findings


def _sound(held: Sources) -> Followed:
    """Return all tensors of a file, with the metadata that goes with them."""
    picks = [(0, number, name) for number, name in enumerate(held.names(0))]
    return follow(held, picks, together(held))


def _of(path: str, tensor: str | None, found: str) -> str:
    """Return `found` without the file and the tensor at its start."""
    found = found.removeprefix(f"{_escaped(path)}: ")
    return found if tensor is None else found.removeprefix(f"tensor {_quoted(tensor)}: ")
