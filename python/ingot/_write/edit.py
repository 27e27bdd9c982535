"""Metadata, and single tensors, of files that are there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ingot import _native
from ingot._base.checks import is_durable
from ingot._base.frameworks import payload
from ingot._base.options import Saving, checked, takes
from ingot._base.progress import telling
from ingot.typing import EditOptions, Path

from .directory.lock import locked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(EditOptions)
def update_metadata(
    filename: Path,
    set: Mapping[str, str] | None = None,
    remove: Iterable[str] = (),
    *,
    atomic: bool = False,
    **options: Unpack[EditOptions],
) -> Literal["unchanged", "in-place", "rewritten"]:
    """Change the text that is stored beside the tensors of a file. No tensor is read.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        The file, in either format. A symlink is followed.
    set : dict of str to str, optional
        Keys with their new values. Other keys keep theirs.
    remove : iterable of str
        Keys to remove. Those that are not there are passed over; one that is in `set` too is removed.
    atomic : bool
        Always write a new file and rename it over the old one. If False, the file is changed in place where
        the notes below allow it.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Returns
    -------
    {"unchanged", "in-place", "rewritten"}
        What was done. ``"rewritten"`` leaves room for the next change, of at least 512 bytes.

    Raises
    ------
    TypeError
        A key or a value is not a str. The message names the key.
    OSError
        The file cannot be opened for reading and writing.
    HeaderError
        The file breaks a rule of its format.
    SafetensorError
        ``ingot.shared`` in `set` is no record of names that share tensors of this file (``code`` is
        ``"invalid-alias"``). Nothing was touched.
    SaveError
        The header would be longer than 100,000,000 bytes. Nothing was touched.
    StorageError
        Writing failed; another process replaced the file meanwhile (``code`` is ``"overtaken"``), and what it
        wrote stays; or another edit held the file for a minute (``"locked"``).

    Notes
    -----
    The file is changed in place where the new metadata fits into the room of the header (``reserve_header``
    of `save_file`, the spaces that an earlier change left, those at the end of a header) and all bytes that
    differ lie within one 4096-byte page of the file. They are then changed by one write, which the system
    copies at once. A file with other hard links, or in the Hugging Face cache, is never changed in place.
    What that means:

    - A process that is killed, at any moment, leaves the old file or the new one.
    - A reader that reads the header before or after the write sees the old or the new metadata, whole. One
      that reads it in the very microsecond in which it is copied may see some old and some new bytes, on
      file systems that do not lock reads against writes (ext4, tmpfs; XFS does): a value that is part old,
      part new, or a header that is refused. That came to 2 of 28,000 reads beside a process that did nothing
      but edit. Names, shapes and data are never in question. ``atomic=True`` avoids it.
    - Loss of power leaves the old or the new page if the disk writes blocks of 4096 bytes as a whole, as
      those with physical sectors of that size do. ``atomic=True`` does not depend on it.
    - Handles that were open before notice, by the time of modification, that the file was written to, and
      raise `StorageError` (``code`` is ``"changed"``) when they are asked for tensors; tensors that were
      taken from them remain good.

    Otherwise a new file is made beside the old one and renamed over it, with all that `save_file` promises:
    mode, owner and symlinks are kept, readers see the old file or the new one, whole, whatever happens. The
    data is shared with the old file where the file system can (reflinks on XFS and Btrfs), else it is copied
    by the kernel.

    Signatures of the whole file (``c2pa:manifest``, ``c2pa:manifest.uri``, ``__signature__``) are removed,
    since the change breaks them, unless `set` has them or nothing else changes.

    Changes at the same time, in any number of processes, wait for one another (``flock``), and none is lost.
    """
    given = checked(
        update_metadata, {"set": set, "remove": remove, "atomic": atomic, **options}, remove=_keys
    )
    change = given["set"] or {}, given["remove"], not atomic, is_durable(given.get("durable"))
    if not given.get("progress"):
        # A context manager takes a twentieth of the time of a change in place.
        return _native.update_metadata(filename, *change, None)
    with telling(given["progress"], "Writing", filename) as tell:
        return _native.update_metadata(filename, *change, tell)


def _keys(remove: Any) -> list[str]:
    # A str is an iterable of str, so it would be taken for the names of its letters.
    if isinstance(remove, (str, bytes)) or not hasattr(remove, "__iter__"):
        raise TypeError(f"remove must be an iterable of str, found {type(remove).__name__}")
    keys = [*remove]
    wrong = [type(key).__name__ for key in keys if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"remove must be an iterable of str, found {type(remove).__name__} of {wrong[0]}")
    return keys


@takes(EditOptions)
def replace_tensor(filename: Path, name: str, tensor: Any, **options: Unpack[EditOptions]) -> None:
    """Put other values into one tensor of a file. The rest stays as it is, byte for byte.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        The file, in either format. A symlink is followed.
    name : str
        The tensor. Names that share it (``save_file(..., shared="alias")``) stay names of that one tensor,
        and any of them may be given; parts of it are parts of the new values.
    tensor : array or tensor of any framework
        Of the dtype and the shape that stand in the header.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Raises
    ------
    TensorNotFoundError
        There is no such tensor.
    SaveError
        Dtype or shape differ (``code`` is ``"mismatch"``), or the tensor has no values.
    SafetensorError
        The name is one of a part of a stored tensor (``"invalid-alias"``), which the message names.
    OSError, HeaderError, StorageError
        As for `update_metadata`.

    Notes
    -----
    This always makes a new file and renames it over the old one, with the promises of `save_file`. Writing
    into the old one could not be done at once, and no reader knows of a journal by which it could be seen
    whole; so a killed process or a reader in between would get half of the old values and half of the new.
    The other tensors are shared with the old file or copied by the kernel, as for `update_metadata`.
    """
    how = Saving.of(replace_tensor, options)
    with telling(how.progress, "Writing", filename) as tell:
        _native.replace_tensor(filename, name, tensor, payload, how.flush, tell)


def update_index(path: str, set: Mapping[str, str], remove: Iterable[str]) -> None:
    """Change the metadata of an index. The rest of it stays."""
    # This refuses an index that breaks a rule.
    _native.ShardIndex.read(path)
    with locked(os.path.dirname(os.path.realpath(path))):
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        metadata = {**(index.get("metadata") or {}), **set}
        index["metadata"] = {key: value for key, value in metadata.items() if key not in remove}
        text = json.dumps(index, indent=2)
        _native.replace_file(path, [text.encode()], overwrite=True, durable=is_durable(None))
