"""Uploads of files, and of models of many files, to stores."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from ingot._base.checks import checked_text
from ingot._base.options import Saving, checked, takes
from ingot._base.progress import Several, reporting_on
from ingot._base.report import Report
from ingot._base.text import _escaped, located
from ingot._native import (
    Checkpoint,
    ShardIndex,
    check_upload,
    local_path,
    remove_objects,
    shown_url,
    upload_file,
)
from ingot.errors import OptionError, StorageError
from ingot.typing import NoOptions, Path, Progress, StorageOptions


@dataclass(frozen=True, slots=True, repr=False)
class Upload(Report):
    """A file or a model that was uploaded. `upload` returns one.

    Attributes
    ----------
    url : str
        The URL of the object, without secrets; of a model of many files the index.
    nbytes : int
        The size in bytes; for a model, of all files together.
    files : tuple of Upload
        The files of a model of many: the shards in the order of their names, then the index. Empty for one
        file.

    Examples
    --------
    >>> model = ingot.upload("gpt2/", "s3://models/gpt2/")  # doctest: +SKIP
    >>> model.url, model.nbytes  # doctest: +SKIP
    ('s3://models/gpt2/model.safetensors', 548105171)
    """

    url: str
    nbytes: int
    files: tuple[Upload, ...] = ()


@takes()
def upload(
    source: Path,
    destination: str,
    *,
    overwrite: bool = False,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    **options: Unpack[NoOptions],
) -> Upload:
    """Upload a file or a model to a store, byte for byte.

    Parameters
    ----------
    source : str, bytes or os.PathLike
        A file of any content. An index, whose name is ``*.index.json``, and a directory with one, is a model
        of many files: the index and all files that it names are uploaded. A directory without an index is the
        only file of tensors in it.
    destination : str
        The URL of the object, of ``s3://`` or ``az://``. If it ends in a slash, it is a folder, and the file
        keeps its name. For a directory, and for a model of many files, it is always a folder.
    overwrite : bool
        Replace an object that exists. If not, the request of the store that makes an object is a conditional
        one.
    progress : bool, None or callable
        As for `load_file`, over the bytes of all files.
    storage_options : dict, optional
        How the store is reached (`ingot.StorageOptions`).

    Returns
    -------
    Upload
        The URL, the bytes, and the files of a model.

    Raises
    ------
    FileExistsError
        An object exists, and `overwrite` is not set. If it is the index or the only object, no byte was sent.
    OSError
        `source` cannot be read, or the store refuses a request (`PermissionError`).
    StorageError
        The store cannot be reached, or answers errors more often than the retries allow; a file was written
        to during the call (``code`` is ``"changed"``); the store does not obey conditions, and `overwrite` is
        not set (``"unconditional-store"``).
    CheckpointError
        The index breaks a rule of FORMAT.md, or a directory has no file of tensors, or several without an
        index.
    TypeError, OptionError
        An argument has a wrong type or value, or `destination` is not a URL that can be written to.

    Notes
    -----
    Parts of a file go up over several connections, with a checksum each, and at most 192 MiB of them are in
    memory. An object appears when it is complete, or not at all, and no object is made of a file that changes
    meanwhile. A repeated call sends the whole file again.

    The index of a model goes last. With `overwrite`, the old index is removed before the first shard is sent,
    since shards keep their names: until the call has succeeded there is no index, and never one that names
    shards of two models. `ingot.torch.save_sharded` and `ingot.split` replace a model without such a gap.

    Examples
    --------
    >>> ingot.upload("gpt2/model.safetensors", "s3://models/gpt2/").nbytes  # doctest: +SKIP
    548105171
    """
    given = checked(upload, locals(), destination=_checked_url)
    how = Saving.among(upload, given)
    pairs = _pairs(os.fsdecode(given["source"]), destination)
    total = sum(pair.nbytes for pair in pairs)
    last = pairs[-1]
    with reporting_on(how.progress, "Uploading", given["source"]) as tell:
        if not how.overwrite:
            # The conditions of the requests decide, but most conflicts exist before the first byte is sent.
            check_upload(last.url, last.nbytes, how.storage_options)
        elif len(pairs) > 1:
            remove_objects([last.url], how.storage_options)
        steps = Several(tell, total)
        try:
            sent = [_send(pair, how, steps) for pair in pairs[:-1]]
            _check_unchanged(pairs)
            sent.append(_send(last, how, steps))
        except BaseException as fault:
            if len(pairs) > 1:
                shown = _escaped(shown_url(last.url))
                fault.add_note(f"files of this model may exist beside {shown}: overwrite=True replaces them")
            raise
    return _model(sent)


def planned(source: Path, destination: str) -> Upload:
    """Return the result of an `upload`, without a request."""
    pairs = _pairs(os.fsdecode(local_path(source)), _checked_url(destination))
    return _model([Upload(shown_url(pair.url), pair.nbytes) for pair in pairs])


def _checked_url(destination: object) -> str:
    """Return `destination`, which must be a URL that can be written to."""
    url: str = checked_text("destination", destination)
    if url.partition("://")[0].lower() not in ("s3", "az"):
        shown = _escaped(shown_url(url))
        reason = f"destination {shown} cannot be uploaded to: expected a URL of s3:// or az://"
        raise OptionError(reason, code="bad-url", found=shown)
    return url


class _Pair(NamedTuple):
    """A file, and the URL of its object."""

    path: str
    url: str
    nbytes: int
    #: The version of the file. It changes if the file is written to or replaced.
    version: tuple[int, ...]


def _pairs(source: str, destination: str) -> list[_Pair]:
    """Return the files to upload, the index of a model last."""
    if not os.path.isdir(source) and not source.endswith(".index.json"):
        url = destination + os.path.basename(source) if destination.endswith("/") else destination
        return [_pair(source, url)]
    with closing(Checkpoint.open(source, "pread")) as model:
        path = os.fsdecode(model.path or source)
    index, (directory, name) = ShardIndex.read(path), os.path.split(path)
    # Shards may be in folders below the index.
    names = [*(index.shards if index else ()), name]
    folder = destination.removesuffix("/")
    return [_pair(os.path.join(directory, name), f"{folder}/{name}") for name in names]


def _pair(path: str, url: str) -> _Pair:
    return _Pair(path, url, os.stat(path).st_size, _version(path))


def _version(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_unchanged(pairs: list[_Pair]) -> None:
    """Raise if a file of the model was replaced meanwhile, so that the index may be of another model."""
    for pair in pairs:
        if _version(pair.path) != pair.version:
            raise located(
                StorageError, "the file was changed during the upload", code="changed", path=pair.path
            )


def _send(pair: _Pair, how: Saving, steps: Several) -> Upload:
    nbytes = upload_file(
        pair.path,
        pair.url,
        overwrite=how.overwrite,
        storage_options=how.storage_options,
        progress=steps.step(pair.nbytes),
    )
    return Upload(shown_url(pair.url), nbytes)


def _model(sent: list[Upload]) -> Upload:
    """Return one upload of all files."""
    if len(sent) == 1:
        return sent[0]
    return Upload(sent[-1].url, sum(one.nbytes for one in sent), tuple(sent))
