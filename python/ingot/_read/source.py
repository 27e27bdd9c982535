"""Objects to read from instead of a file: open files, buffers, and files in stores of other libraries.

The plan decides which bytes are read and how many ranges are requested at once, as for every source. This
module answers one range (`Reader.ask`) with a future, so that a caller can stop waiting for a store that
hangs.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from operator import index
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol, Unpack
from weakref import WeakSet

from ingot._base.checks import checked_text, is_buffer
from ingot._base.options import checked, takes
from ingot._base.report import restored
from ingot._base.text import _escaped, located
from ingot._base.waits import settled
from ingot._native import shown_url
from ingot.errors import ClosedError, OptionError, SafetensorError, StorageError
from ingot.typing import Buffer, NoOptions

if TYPE_CHECKING:

    class Closes(Protocol):
        """An object that may read in a thread of its own."""

        def close(self) -> None: ...


# The number of bytes that are copied at a time.
_PART_NBYTES = 8 << 20

# The largest size of a file that systems can express.
_MOST_NBYTES = 2**63 - 1

# The best number of concurrent requests, as for a URL.
_AT_ONCE = 16


# Threads of readers that read ahead. A thread that requests bytes at the exit of the interpreter would abort
# the process.
_READING: WeakSet[Closes] = WeakSet()


def close_at_exit(reading: Closes) -> None:
    """Close `reading` before the interpreter exits, which ends its thread."""
    _READING.add(reading)


@atexit.register
def _close() -> None:
    for reading in list(_READING):
        reading.close()


class Ranges:
    """A file in a store, to pass instead of a path to functions that read.

    Parameters
    ----------
    store : obstore store, fsspec file system, or any object like one
        The store. For obstore, an object with the methods ``get_ranges(path, starts=, ends=)``, which returns
        buffers, and ``head(path)``, which returns a mapping with ``"size"``; for fsspec, an object with
        ``cat_ranges`` and ``info``. Your own class needs one of these pairs. Up to 16 threads call it at
        once; an fsspec file system that is not asynchronous is called by one thread at a time.
    path : str
        The file's path in the store.
    nbytes : int, optional
        The size, if it is known. It is then not requested, and ``head`` is not needed; replacing the file by
        another one of the same size is then not noticed.

    Raises
    ------
    TypeError
        `store` has neither pair of methods, or `path` is not a str.
    OptionError
        `nbytes` is negative, or larger than any file.

    Notes
    -----
    It keeps a reference to the store and never closes it. Pickling a handle pickles the store.

    Examples
    --------
    >>> from obstore.store import LocalStore  # S3Store, GCSStore and so on work likewise
    >>> source = ingot.Ranges(LocalStore("."), "model.safetensors")
    >>> ingot.numpy.load_file(source, keys="wte")["wte"].shape
    (8, 4)
    """

    __slots__ = ("nbytes", "path", "store")

    @takes()
    def __init__(
        self, store: Any, path: str, *, nbytes: int | None = None, **options: Unpack[NoOptions]
    ) -> None:
        given = checked(Ranges.__init__, locals(), store=_known_store, path=partial(checked_text, "path"))
        self.store, self.path, self.nbytes = store, path, given["nbytes"]

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, ("Ranges", (self.store, self.path), {"nbytes": self.nbytes})

    def __repr__(self) -> str:
        return f"ingot.Ranges({type(self.store).__name__}, {shown_url(self.path)!r})"


def _known_store(store: Any) -> Any:
    """Return `store`, which must have the methods of obstore's stores or fsspec's file systems."""
    if not _is_fsspec(store) and not callable(getattr(store, "get_ranges", None)):
        raise TypeError(
            "store must have `get_ranges`, as obstore's stores have, or `cat_ranges` and `info`, as fsspec's "
            f"file systems have, found {type(store).__name__}"
        )
    return store


def resolved(given: Any) -> Any:
    """Return the `Reader` of an object, the buffer itself, or the path of a local file.

    Return None if `given` cannot be read from. `given` is neither str nor bytes.
    """
    if isinstance(given, Ranges):
        return _of_store(given.store, given.path, given.nbytes)
    path = getattr(given, "path", None)
    if isinstance(path, str) and _is_fsspec(getattr(given, "fs", None)):
        _check_fsspec(given)
        return _of_store(given.fs, path, None)
    if hasattr(given, "__fspath__"):
        return os.fspath(given)
    if callable(getattr(given, "getbuffer", None)):
        _check_open(given, _named(given))
        return _Memory(given)
    if is_buffer(given):
        return given
    is_file = all(callable(getattr(given, name, None)) for name in ("read", "seek", "tell"))
    return _File(given) if is_file else None


def shown(found: Reader | Buffer) -> str:
    """Return the name of an object or a buffer."""
    return found.name if isinstance(found, Reader) else f"<{type(found).__name__}>"


class Reader:
    """The source from which the extension module reads bytes."""

    name: str
    """The name for errors, without secrets."""
    nbytes: int
    at_once: int
    """The number of ranges that may be requested at once. None if requests do not wait."""

    def ask(self, begin: int, end: int) -> Future[Any]:
        """Request the bytes of a range: a buffer."""
        raise NotImplementedError

    def ask_nbytes(self) -> Future[int | None]:
        """Request the current size. None if the size is unchanged but the bytes are not."""
        return done(self.nbytes)

    def parts(self) -> Iterator[Any]:
        """Yield all bytes, a part after the other. Several parts are requested ahead.

        Raises
        ------
        StorageError
            A part cannot be read, or the file was replaced during the read.
        """
        asked: deque[tuple[int, Future[Any]]] = deque()
        for begin in range(0, self.nbytes, _PART_NBYTES):
            end = min(begin + _PART_NBYTES, self.nbytes)
            asked.append((end - begin, self.ask(begin, end)))
            if len(asked) > self.at_once:
                yield self._answer(*asked.popleft())
        for expected, answer in asked:
            yield self._answer(expected, answer)
        now = settled(self.ask_nbytes()).result()
        if now != self.nbytes:
            reason = "the file was changed while it was read"
            raise located(
                StorageError, reason, code="changed", path=self.name, expected=self.nbytes, found=now
            )

    def _answer(self, expected: int, answer: Future[Any]) -> Any:
        try:
            part = settled(answer).result()
            found = memoryview(part).nbytes
        except SafetensorError:
            raise
        except Exception as error:
            raise self._fault(error) from error
        if found != expected:
            reason = f"expected {expected} bytes of the object, found {found}"
            raise located(StorageError, reason, code="read", path=self.name, expected=expected, found=found)
        return part

    def _fault(self, error: Exception) -> Exception:
        """Return an error in place of the object's own, whose message may contain secrets."""
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
        message = f"{_escaped(self.name)}: the object raised {type(error).__name__}"
        return StorageError(message, code="read", path=self.name)


def done(result: Any) -> Future[Any]:
    """Return the answer to a request that did not wait."""
    answer: Future[Any] = Future()
    answer.set_result(result)
    return answer


class _Memory(Reader):
    """An object with bytes in memory, such as `io.BytesIO`, which are borrowed while they are copied."""

    at_once = 0

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.name = _named(memory)
        self.nbytes = memoryview(memory.getbuffer()).nbytes

    def ask(self, begin: int, end: int) -> Future[Any]:
        _check_open(self._memory, self.name)
        return done(self._memory.getbuffer()[begin:end])

    def ask_nbytes(self) -> Future[int | None]:
        return done(memoryview(self._memory.getbuffer()).nbytes)


class _Waiting(Reader):
    """Each answer comes from a thread of its own, which is abandoned if the caller stops waiting."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = os.getpid()

    def _later(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._process != os.getpid():
            # An open file shares its position with the parent, and a store has threads that do not exist in a
            # child.
            reason = "it was opened in another process, before a fork: open it again in this one"
            raise located(ClosedError, reason, code="forked", path=self.name)
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                found = work(*arguments)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)

        Thread(target=run, name="ingot-ask", daemon=True).start()
        return answer

    def _opening(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, which runs before there is a reader."""
        try:
            return settled(self._later(work)).result()
        except SafetensorError:
            raise
        except Exception as error:
            raise self._fault(error) from error


class _File(_Waiting):
    """An open file, read one range at a time, since it has one position."""

    at_once = 1

    def __init__(self, file: Any) -> None:
        super().__init__(_named(file))
        self._file = file
        self._lock = Lock()
        _check_open(file, self.name)
        for method, code, what in (
            ("readable", "not-readable", "is not open for reading"),
            ("seekable", "not-seekable", "cannot be read at any position: read it, and use `load(data)`"),
        ):
            able = getattr(file, method, None)
            if callable(able) and not able():
                raise OptionError(f"{_escaped(self.name)}: {what}", code=code, path=self.name)
        if isinstance(file, io.TextIOBase) or isinstance(file.read(0), str):
            raise _text(self.name, file)
        self.nbytes = self._opening(self._size)

    def ask(self, begin: int, end: int) -> Future[Any]:
        return self._later(self._read, begin, end)

    def _size(self) -> int:
        # Some objects have this method, but would have to read everything to find the end.
        nbytes = getattr(self._file, "size", None)
        if isinstance(nbytes, int):
            return _possible(nbytes, self.name)
        with self._lock:
            self._file.seek(0, os.SEEK_END)
            return _possible(self._file.tell(), self.name)

    def _read(self, begin: int, end: int) -> Any:
        file = self._file
        with self._lock:
            _check_open(file, self.name)
            file.seek(begin)
            found = file.read(end - begin)
            if 0 < len(found) < end - begin:
                found = bytearray(found)
                while len(found) < end - begin and (more := file.read(end - begin - len(found))):
                    found += more
            if file.tell() != begin + len(found):
                expected, now = begin + len(found), file.tell()
                reason = f"its position was moved while it was read: expected {expected}, found {now}"
                reason = f"{reason} — do not use it elsewhere during the read"
                raise located(
                    StorageError, reason, code="moved", path=self.name, expected=expected, found=now
                )
        return found


class _Store(_Waiting):
    """A file in a store."""

    def __init__(
        self,
        name: str,
        at_once: int,
        get: Callable[[int, int], Any],
        facts: Callable[[], Mapping[str, Any]] | None,
        nbytes: int | None,
    ) -> None:
        super().__init__(name)
        self.at_once = at_once
        self._get = get
        self._facts = facts if nbytes is None else None
        self._turn = Lock() if at_once == 1 else nullcontext()
        self._stamp: dict[str, Any] = {}
        if nbytes is None:
            self._stamp = self._opening(self._now)
        self.nbytes = self._stamp["size"] if nbytes is None else nbytes

    def ask(self, begin: int, end: int) -> Future[Any]:
        return self._later(self._read, begin, end)

    def _read(self, begin: int, end: int) -> Any:
        # Writers read from several threads, even if `at_once` is 1.
        with self._turn:
            return self._get(begin, end)

    def ask_nbytes(self) -> Future[int | None]:
        return self._later(self._nbytes) if self._facts is not None else super().ask_nbytes()

    def _now(self) -> dict[str, Any]:
        """Return the size and the facts that distinguish versions of the file."""
        assert self._facts is not None
        seen = self._facts()
        if seen.get("size") is None:
            reason = "the store does not report its size: pass it, as `ingot.Ranges(store, path, nbytes=…)`"
            raise located(StorageError, reason, code="no-size", path=self.name)
        stamp = {key: seen[key] for key in _VERSION if seen.get(key) is not None}
        return {**stamp, "size": _possible(seen["size"], self.name)}

    def _nbytes(self) -> int | None:
        now = self._now()
        was_replaced = now["size"] == self.nbytes and now != self._stamp
        return None if was_replaced else now["size"]


# Names for the size of a file in stores, and for values that change when the file is replaced.
_VERSION = (
    *("size", "ETag", "etag", "e_tag", "version", "version_id", "VersionId", "generation", "md5Hash"),
    *("content_md5", "mtime", "modified", "last_modified", "LastModified", "updated", "created"),
)


def _possible(nbytes: Any, name: str) -> int:
    """Return the size that an object claims for the file `name`.

    Raises
    ------
    StorageError
        No file has this size.
    """
    is_whole = hasattr(nbytes, "__index__") and not isinstance(nbytes, bool)
    if not is_whole or not 0 <= index(nbytes) <= _MOST_NBYTES:
        way_out = "pass the right size, as `ingot.Ranges(store, path, nbytes=…)`"
        reason = f"expected a size in bytes from 0 to {_MOST_NBYTES}, found {nbytes!r:.80} — {way_out}"
        raise located(
            StorageError, reason, code="impossible-size", path=name, expected=_MOST_NBYTES, found=nbytes
        )
    return index(nbytes)


def _of_store(store: Any, path: str, nbytes: int | None) -> Reader | str:
    if not _is_fsspec(store):
        head: Any = getattr(store, "head", None)
        if nbytes is None and not callable(head):
            expected = (
                "a store with `head`, or the size of the file, as in `ingot.Ranges(store, path, nbytes=…)`"
            )
            raise TypeError(f"expected {expected}, found {type(store).__name__}")
        get = partial(store.get_ranges, path)
        facts: Any = partial(head, path) if callable(head) else None
        return _Store(shown_url(path), _AT_ONCE, lambda a, b: _only(get(starts=[a], ends=[b])), facts, nbytes)
    if type(store).__module__ == "fsspec.implementations.local":
        # Local files are read by path, which is faster.
        return str(store._strip_protocol(path))
    name, get = shown_url(store.unstrip_protocol(path)), partial(store.cat_ranges, [path], on_error="raise")
    # Instances of other classes are for one thread.
    at_once = _AT_ONCE if getattr(store, "async_impl", False) else 1
    return _Store(name, at_once, lambda a, b: _only(get([a], [b])), lambda: store.info(path), nbytes)


def _only(answers: Any) -> Any:
    (answer,) = answers
    return answer


def _is_fsspec(store: Any) -> bool:
    return callable(getattr(store, "cat_ranges", None)) and callable(getattr(store, "info", None))


def _check_fsspec(file: Any) -> None:
    """Raise for a file whose bytes differ from the stored bytes of its file system."""
    name = shown_url(file.fs.unstrip_protocol(file.path))
    _check_open(file, name)
    mode, packed = getattr(file, "mode", "rb"), getattr(file, "compression", None)
    if isinstance(mode, str) and "r" not in mode:
        raise OptionError(f"{_escaped(name)}: is not open for reading", code="not-readable", path=name)
    if isinstance(mode, str) and "t" in mode:
        raise _text(name, file)
    if packed is not None:
        reason = f"is unpacked by {packed} during the read: pass the result of its `open()`"
        raise located(OptionError, reason, code="compressed", path=name)


def _check_open(file: Any, name: str) -> None:
    if getattr(file, "closed", False) is True:
        raise ClosedError(f"{_escaped(name)}: the {type(file).__name__} is closed", code="closed", path=name)


def _text(name: str, file: Any) -> TypeError:
    found = type(file).__name__
    return TypeError(f'{_escaped(name)}: the {found} returns text: expected bytes — open it with mode "rb"')


def _named(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and name else f"<{type(file).__name__}>"
