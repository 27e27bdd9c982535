"""Files behind URLs, fetched to be kept."""

from __future__ import annotations

from os import fspath
from typing import NamedTuple

from . import _native
from ._progress import checked, told
from ._reads import checked_threads
from ._serialize import is_durable
from .errors import _escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._progress import Progress
    from ._remote import StorageOptions
    from ._serialize import Path


class Download(NamedTuple):
    """What `download` has fetched.

    Attributes
    ----------
    path : str
        Where the file is.
    nbytes : int
        Its size.
    fetched : int
        Bytes that came over the network for it: fewer than `nbytes` where an earlier call that was broken off
        had some of them, 0 where the file came out of the Hub's local cache.
    sha256 : str or None
        What it was compared with: the digest that the caller expects, or the one that the Hub keeps. None
        where nobody said what it has to be.
    """

    path: str
    nbytes: int
    fetched: int
    sha256: str | None


def download(
    source: str,
    path: Path,
    *,
    expected_sha256: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = False,
    durable: bool | None = None,
    storage_options: StorageOptions | None = None,
) -> Download:
    """Fetch what is behind a URL, and keep it. Again after it was broken off, it goes on from there.

    Parameters
    ----------
    source : str
        The URL of any file, as for `ingot.safe_open`.
    path : str, bytes or os.PathLike
        Where to write. In a directory, which exists or ends in a slash, the file has the name that it has in
        the URL. Until all of it is there, nothing has this name, or what had it before stays.
    expected_sha256 : str, optional
        The SHA-256 of the file, as 64 hexadecimal digits. What has another is not kept. Files of the Hub that
        it keeps as LFS or Xet objects, as it does those with weights, are compared with the one it says.
    overwrite : bool
        Replace what is at `path`, also if it is read-only; mode and owner pass on to the new file.
    threads : int, optional
        How many parts are fetched at once, 16 by default.
    progress : bool or callable
        As for `load_file`. What is there from an earlier call counts as done.
    durable : bool, optional
        As for `save_file`.
    storage_options : dict, optional
        How the URL is reached (`ingot.StorageOptions`).

    Returns
    -------
    Download
        ``path``, ``nbytes``, ``fetched`` and ``sha256``.

    Raises
    ------
    FileExistsError
        There is something at `path`, and `overwrite` is not set.
    OSError
        The server has no such file or refuses it (`FileNotFoundError`, `PermissionError`); or the directory
        of `path` cannot be written to.
    StorageError
        The server cannot be reached, or breaks off more often than it is asked again; the file was replaced
        meanwhile (``code`` is ``"changed"``); writing failed; another process fetches this file (``"busy"``).
    IntegrityError
        It is not what `expected_sha256`, or the Hub, says (``"digest-mismatch"``).
    TypeError, OptionError
        An argument is not what it should be.

    Notes
    -----
    Parts of 1 to 8 MiB come over several connections into ``.{name}.ingot-part`` beside `path`, which has
    notes of them behind its last byte. That file stays when the call ends early: by an error, by Ctrl-C, with
    the process or with the machine. The next call for the same URL reads every part again that the notes
    name, keeps those that have the hash which was noted, and fetches the rest. It does so only for the very
    same version (the ETag, or else size and time of modification); for another it begins anew. A server that
    says neither is never gone on with, and one that serves no parts of files is read from the start each
    time.

    What `path` is to hold is neither read nor judged: it may be any file.
    """
    if not isinstance(source, str):
        raise TypeError(f"source must be a str, found {type(source).__name__}")
    threads = checked_threads(threads)
    with told(checked(progress), f"Downloading {_escaped(_name(source))}") as tell:
        done = _native.download(
            source,
            fspath(path),
            storage_options=storage_options,
            expected_sha256=expected_sha256,
            overwrite=overwrite,
            durable=is_durable(durable),
            threads=threads,
            progress=tell,
        )
    return Download(*done)


def _name(source: str) -> str:
    """What is shown of a URL: its end, and no query, which may be secret."""
    return source.split("?")[0].rstrip("/").rpartition("/")[2]
