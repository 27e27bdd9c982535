"""Files behind URLs, and models of many of them, fetched to be kept."""

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
        Its size; of a model the size of all files together.
    fetched : int
        The bytes that came over the network: fewer than `nbytes` if an earlier, interrupted call fetched some
        of them, 0 if the file came from the Hub's local cache.
    sha256 : str or None
        The digest that the file was compared with: the one that the caller expects, or the one that the Hub
        keeps. None if there is neither, and for a model, whose `files` have their own.
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
        The URL of any file, as for `ingot.safe_open`. An index, whose name
        is ``*.index.json``, or a repository of the Hub that has an index and no ``model.safetensors``, is a
        model of many files: the index and every file that it names, which lie beside it, are fetched.
    destination : str, bytes or os.PathLike
        Where to write. In a directory, which exists, or ends in a slash and then is made, the file has the
        name that it has in the URL. Until all of it is there, nothing has this name, or the old file
        stays. For a model of many files it has to be a directory.
    expected_sha256 : str, optional
        The SHA-256 of the file, as 64 hexadecimal digits. What has another is not kept. Files of the Hub that
        it keeps as LFS or Xet objects, as it does those with weights, are compared with the Hub's. It is
        refused for a model of many files, which one digest cannot describe.
    threads : int, optional
        How many parts are fetched at once, of all files together, 16 by default.
    progress : bool, None or callable
        As for `load_file`, over the bytes of all files. What is there from an earlier call counts as done.
    storage_options : dict, optional
        How the URL is reached (`ingot.StorageOptions`).
    **options
        How the file is written: `ingot.typing.SaveOptions`. A new file keeps mode and owner of the file that
        it replaces.

    Returns
    -------
    Download
        The path, the bytes, and the files of a model.

    Raises
    ------
    FileExistsError
        There is something at `destination`, or where a shard goes, and `overwrite` is not set. No shard was
        asked for.
    OSError
        The server has no such file or refuses it (`FileNotFoundError`, `PermissionError`); or the directory
        of `destination` cannot be written to.
    StorageError
        The server cannot be reached, or breaks off more often than it is asked again; the file was replaced
        meanwhile (``code`` is ``"changed"``); writing failed; another process fetches this file (``"busy"``).
    IntegrityError
        It is not what `expected_sha256`, or the Hub, says (``"digest-mismatch"``).
    CheckpointError
        The index breaks a rule of FORMAT.md, such as I6: names of shards that lead out of its directory are
        refused before any of them is asked for.
    TypeError, OptionError
        An argument has a wrong type or value. `destination` is no directory, and the source is a model of
        many files.

    Notes
    -----
    Parts of 1 to 8 MiB arrive over several connections in ``.{name}.ingot-part`` beside `destination`. The
    hash of each part follows the data. The file stays when the call ends early: by an error, by Ctrl-C, with
    the process or with the machine. The next call for the same URL keeps the parts that have their hash and
    fetches the rest, if the server still has the same version (ETag, or else size and modification time). It
    starts again for another version, for a server that names no version, and for one that serves no parts.

    The content of the file is not checked: it may be any file.

    All files of a model arrive together. Those of the Hub are from the commit of the index, and a shard that
    is the same in another commit is resumed. When all shards are complete, they get their names, and the
    index gets its name last. With `overwrite`, the old index is removed just before the first shard is
    replaced. If a call ends between these renames, the next call recognises the shards that have their names
    by version and hash, and keeps them. Any other existing file is an error unless `overwrite` is set.
    Symbolic links in the directory are followed.

    Examples
    --------
    >>> ingot.download("hf://gpt2", "gpt2/").nbytes  # doctest: +SKIP
    548105171
    """
    given = checked(download, locals(), source=partial(checked_text, "source"))
    how = Saving.among(download, given)
    path = os.fsdecode(_native.local_path(destination))
    with reporting_on(how.progress, "Downloading", source) as tell, new_folders(path):
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
    """Return what `download` would return if it fetched all bytes, and write nothing."""
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
