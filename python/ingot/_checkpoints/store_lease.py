"""The lease of a folder of a store: one process at a time writes to it, on any machine.

A lease is an object with a number, which is made by a conditional request. The highest number is the lease,
and it never becomes lower: a lease that ends stays as an object that says so, until a higher one exists. A
late request of a process that has lost its lease writes a lower number, which means nothing. The holder
writes its object again every few seconds. Ages of objects are by the store's clock.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from contextlib import suppress

from ingot._base.text import located
from ingot._native import fetch_beside, list_objects, remove_objects, replace_object, shown_url
from ingot.errors import StorageError
from ingot.typing import StorageOptions

from . import lease
from .lease import Holder, busy, held_here, holder_in, is_alive

#: Seconds between two looks at the lease of another process.
PAUSE_SECONDS = 1.0
# A lease was renewed if it is younger than expected by more than the clocks of a store's machines differ.
_RENEWED_SECONDS = 5.0
# The most seconds for which the end of a lease waits for a request that renews it.
_END_SECONDS = 30.0
_MOST_NBYTES = 1 << 16
_NAME = re.compile(r"([1-9][0-9]{0,17})\.json")
_FOLDER = ".ingot-lease"
# Leases of this process that have ended, although their objects may say something else: a request has failed.
_ENDED: set[bytes] = set()


class StoreLease:
    """The lease of a folder, for one object of this process.

    Parameters
    ----------
    directory : str
        The URL of the folder, without a slash at the end.
    options : dict, optional
        The `storage_options` of requests.

    Attributes
    ----------
    number : int
        The number of the lease. 0 if this object has none.
    """

    def __init__(self, directory: str, options: StorageOptions | None) -> None:
        self.number = 0
        self._folder, self._options = f"{directory}/{_FOLDER}", options
        self._shown = shown_url(directory)
        self._owner, self._text = 0, b""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lease unless this object has it. Returns whether it is new.

        Raises
        ------
        StorageError
            Another process has it (``code`` is ``"busy"``), or had it in between (``"lease-lost"``), or the
            store ignores conditions (``"unconditional-store"``).
        OSError
            The store refuses a request.
        """
        if self.number and self._owner == os.getpid():
            self.check()
            return False
        try:
            while not self._try():
                # Two processes that saw each other both try again.
                time.sleep(random.uniform(0, PAUSE_SECONDS / 10))
        except BaseException:
            # Ctrl-C may arrive when the object exists.
            self.release()
            raise
        return True

    def _try(self) -> bool:
        """Take the next number, unless another process holds the lease. Returns whether it was possible."""
        last = max(self._ages(), default=0)
        if last:
            self._await_end(last)
        number, text = last + 1, _text(held_here())
        _ENDED.add(text)
        try:
            replace_object(self._url(number), [text], overwrite=False, storage_options=self._options)
        except FileExistsError:
            # The answer to the own request may have been lost. Otherwise another process was faster.
            if self._content(number) != text:
                return False
        self.number, self._text, self._owner = number, text, os.getpid()
        # A process that has ended since the list was read may have had higher numbers.
        found = self._ages()
        if max(found, default=0) != number:
            self._remove(number)
            self.number = 0
            return False
        _ENDED.discard(text)
        self._keep()
        for lower in found:
            if lower < number:
                self._remove(lower)
        return True

    def _await_end(self, number: int) -> None:
        """Wait until a lease has ended or expired. Raise if its holder is alive."""
        began, first = time.monotonic(), None
        while True:
            age, content = self._ages().get(number), self._content(number)
            if age is None or content is None or content in _ENDED:
                return
            holder = holder_in(content)
            alive = None if holder is None else is_alive(holder)
            if alive is False or age >= (lease.EXPIRE_SECONDS if holder is None else holder.seconds):
                return
            first = age if first is None else first
            if alive or age + _RENEWED_SECONDS < first + time.monotonic() - began:
                raise busy(self._shown, holder, f"{_FOLDER}/{number}.json")
            time.sleep(PAUSE_SECONDS)

    def _keep(self) -> None:
        """Start the thread that renews the lease."""
        self._end = threading.Event()
        arguments = (self._folder, self.number, self._text, _once(self._options), self._end)
        self._thread = threading.Thread(target=_renew, args=arguments, name="ingot-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # At exit there are no new threads, and not much left to write.
            self._thread = None

    def is_held(self) -> bool:
        """Return whether this object still has the lease that it took."""
        is_own = bool(self.number) and self._owner == os.getpid()
        return is_own and max(self._ages(), default=0) == self.number

    def check(self) -> None:
        """Raise `StorageError` if another process has taken the lease (``code`` is ``"lease-lost"``)."""
        if self.is_held():
            return
        reason = "another process has taken the lease of the folder, since this one did not renew it, or "
        reason += f"{_FOLDER}/{self.number}.json was removed"
        way_out = "stop one of the two, or call load() in a new with block"
        raise located(StorageError, f"{reason}: {way_out}", code="lease-lost", path=self._shown)

    def release(self) -> None:
        """End the lease, if this object and this process hold it."""
        if not self.number or self._owner != os.getpid():
            return
        _ENDED.add(self._text)
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A late request that renews the lease would hide its end.
            self._thread.join(_END_SECONDS)
        how = _once(self._options)
        with suppress(OSError):
            if max(_ages(self._folder, how), default=0) == self.number:
                text = _text(held_here()._replace(seconds=0.0))
                replace_object(self._url(self.number), [text], overwrite=True, storage_options=how)
        self.number = 0

    def _ages(self) -> dict[int, float]:
        return _ages(self._folder, self._options)

    def _url(self, number: int) -> str:
        return f"{self._folder}/{number}.json"

    def _content(self, number: int) -> bytes | None:
        """Return the content of a lease. None if there is no such object."""
        try:
            return fetch_beside(f"{self._folder}/", f"{number}.json", _MOST_NBYTES, self._options)[1]
        except FileNotFoundError:
            return None

    def _remove(self, number: int) -> None:
        with suppress(OSError):
            remove_objects([self._url(number)], self._options)


def _ages(folder: str, options: StorageOptions | None) -> dict[int, float]:
    """Return the numbers of all leases, and the seconds since each was written."""
    listed = list_objects(f"{folder}/", options)
    return {int(match[1]): age for name, _, _, age in listed if (match := _NAME.fullmatch(name))}


def _renew(
    folder: str, number: int, text: bytes, options: StorageOptions | None, end: threading.Event
) -> None:
    while not end.wait(lease.RENEW_SECONDS):
        # The store may answer the next time.
        with suppress(OSError):
            if max(_ages(folder, options), default=0) != number:
                return
            replace_object(f"{folder}/{number}.json", [text], overwrite=True, storage_options=options)


def _once(options: StorageOptions | None) -> StorageOptions:
    """Return options without retries, for requests that are made again later or that may fail."""
    return {**(options or {}), "retries": 0}


def _text(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode()
