"""Downloads of files behind URLs, and of models of many files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from ingot import _native
from ingot._base.checks import checked_text
from ingot._base.options import Saving, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report
from ingot.typing import Path, Progress, ReplaceOptions, StorageOptions

from .directory import new_folders


@dataclass(frozen=True, slots=True, repr=False)
class Download(Report):
    """A file or a model that was downloaded. `download` returns one.

    Attributes
    ----------
    path : str
        The path of the file; of a model of many files the index.
    nbytes : int
        The size in bytes; for a model, of all files together.
    fetched : int
        The bytes that came over the network: fewer than `nbytes` if an earlier, interrupted call fetched some
        of them, 0 if the file came from the Hub's local cache.
    sha256 : str or None
        The digest that the file was compared with: the caller's, or the Hub's. None if there is neither, and
        for a model, whose `files` have their own.
    files : tuple of Download
        The files of a model of many: the shards in the order of their names, then the index. Empty for one
        file.

    Examples
    --------
    >>> model = ingot.download("hf://gpt2", "gpt2/")  # doctest: +SKIP
    >>> model.path, model.nbytes, model.fetched  # doctest: +SKIP
    ('gpt2/model.safetensors', 548105171, 548105171)
    """

    path: str
    nbytes: int
    fetched: int
    sha256: str | None
    files: tuple[Download, ...] = ()


@takes(ReplaceOptions, rare=("replace_read_only",))
def download(
    source: str,
    destination: Path,
    *,
    expected_sha256: str | None = None,
    threads: int | None = None,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    **options: Unpack[ReplaceOptions],
) -> Download:
    """Download a remote file or model. An interrupted download resumes where it stopped.

    Parameters
    ----------
    source : str
        The URL of any file, as for `ingot.safe_open`. An index, whose name is ``*.index.json``, or a
        repository of the Hub with an index and no ``model.safetensors``, is a model of many files: the index
        and all files that it names are downloaded.
    destination : str, bytes or os.PathLike
        Where to write. If it is an existing directory, or ends in a slash (the directory is then created),
        the file keeps its name from the URL. Until the download is complete, an existing file stays. For a
        model of many files, it must be a directory.
    expected_sha256 : str, optional
        The SHA-256 of the file, as 64 hexadecimal digits. A file with another digest is not kept. Files that
        the Hub stores as LFS or Xet objects, such as weights, are compared with the Hub's digest. Not for a
        model of many files, which one digest cannot describe.
    threads : int, optional
        How many parts are fetched at once, of all files together, 16 by default.
    progress : bool, None or callable
        As for `load_file`, over the bytes of all files. Bytes of an earlier call count as done.
    storage_options : dict, optional
        How the URL is reached (`ingot.StorageOptions`).
    **options
        How the file is written: `ingot.typing.SaveOptions`. A new file keeps the mode and owner of the file
        that it replaces.

    Returns
    -------
    Download
        The path, the bytes, and the files of a model.

    Raises
    ------
    FileExistsError
        The destination, or the file of a shard, exists, and `overwrite` is not set. No shard was requested.
    OSError
        The server has no such file or refuses it (`FileNotFoundError`, `PermissionError`); or the directory
        of `destination` cannot be written to.
    StorageError
        The server cannot be reached, or breaks off more often than the retries allow; the file was replaced
        during the download (``code`` is ``"changed"``); writing failed; or another process downloads this
        file (``"busy"``).
    IntegrityError
        The digest differs from `expected_sha256` or from the Hub's (``"digest-mismatch"``).
    CheckpointError
        The index breaks a rule of FORMAT.md, such as I6. Names of shards outside its directory are rejected
        before any shard is requested.
    TypeError, OptionError
        An argument has a wrong type or value, or `destination` is not a directory and the source is a model
        of many files.

    Notes
    -----
    Parts of 1 to 8 MiB arrive over several connections in ``.{name}.ingot-part`` beside `destination`. The
    hash of each part follows the data. This file stays if the call ends early: by an error, by Ctrl-C, or if
    the process or the machine dies. The next call for the same URL keeps the parts that match their hash and
    downloads the rest, if the server still has the same version (ETag, or else size and modification time).
    It starts again for another version, and for servers that report no version or send no parts.

    The content of the file is not checked: it may be any file.

    All files of a model are downloaded together. Files of the Hub are from the commit of the index; a shard
    that is the same in another commit is resumed. When all shards are complete, they are renamed, and the
    index last. With `overwrite`, the old index is removed just before the first shard is replaced. If a call
    ends between these renames, the next call recognises renamed shards by version and hash, and keeps them.
    Any other existing file is an error unless `overwrite` is set. Symbolic links in the directory are
    followed.

    Examples
    --------
    >>> ingot.download("hf://gpt2", "gpt2/").nbytes  # doctest: +SKIP
    548105171
    """
    given = checked(download, locals(), source=partial(checked_text, "source"))
    how = Saving.among(download, given)
    path = os.fsdecode(_native.local_path(destination))
    with reporting_on(how.progress, "Downloading", source) as tell, new_folders(path, how.flush):
        known = {name: given[name] for name in ("expected_sha256", "threads", "storage_options")}
        known |= how.of_named_file()
        done, files = _native.download(source, destination, **known, progress=tell)
    return Download(*done, tuple(Download(*file) for file in files or ()))


def planned(
    source: str,
    destination: Path,
    *,
    expected_sha256: str | None = None,
    overwrite: bool = False,
    replace_read_only: bool = False,
) -> Download:
    """Return the result of a `download` of all bytes, without writing."""
    options: Any = {
        "expected_sha256": expected_sha256,
        "overwrite": overwrite,
        "replace_read_only": replace_read_only,
    }
    sizes = _native.planned_download(source, destination, storage_options=None, **options)
    files = tuple(Download(path, nbytes, nbytes, None) for path, nbytes in sizes)
    if len(files) == 1:
        return files[0]
    total = sum(file.nbytes for file in files)
    return Download(files[-1].path, total, total, None, files)
