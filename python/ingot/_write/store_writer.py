"""Objects of a store that are written tensor by tensor, in the order of the file.

A thread sends the file in parts, as a save does, and waits for the bytes of each tensor. It takes the last
bytes only after `commit`, so that the object appears then, or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from ingot._base.options import Saving
from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint, check_upload, serialize, shown_url
from ingot.errors import ClosedError, OptionError, SaveError, SliceError, StorageError, TensorNotFoundError

from .save import new_file

# The most bytes that wait in memory for tensors before them in the file.
_AHEAD_NBYTES = 256 << 20
# A file of at most this size is sent in one request, which may be made again in another region.
_AGAIN_NBYTES = 16 << 20
# How often a wait looks for Ctrl-C.
_LOOK_SECONDS = 0.1


class Spec(NamedTuple):
    """The dtype code and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoreWriter:
    """Writes an object of a store.

    Parameters
    ----------
    url : str
        The URL of the object.
    specs : dict of str to Spec
        All tensors.
    records : dict of str to str
        Records about tensors for the metadata.
    how : Saving
        How the object is written.
    """

    def __init__(self, url: str, specs: Mapping[str, Spec], records: Mapping[str, str], how: Saving) -> None:
        self._shown, self._specs = shown_url(url), dict(specs)
        named: dict[str, Any] = dict(specs)
        self._file = new_file(url, named, self._source, how, records=records)
        if not how.overwrite:
            # The condition of the request that makes the object decides, but most conflicts exist before.
            check_upload(url, 0, how.storage_options)
        self._changed = threading.Condition()
        # The elements of each tensor that were not written.
        self._missing = {name: prod(spec.shape) for name, spec in specs.items()}
        self._ranges: dict[str, list[range]] = {name: [] for name in specs}
        # Bytes that were written and not sent, by tensor and position.
        self._held: dict[tuple[str, int], memoryview] = {}
        self._held_nbytes = 0
        # The position that the thread waits for.
        self._awaited: tuple[str, int] | None = None
        # The end of the bytes of each tensor that were sent.
        self._ends = dict.fromkeys(specs, 0)
        # Pieces of a small file, which are sent again if the request is made again.
        self._sent: dict[tuple[str, int, int], bytes] | None = {}
        self._sent_nbytes = 0
        self._is_committing = self._is_closed = self._is_forked = False
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None

    def _source(self, name: str, spec: Spec) -> tuple[str, tuple[int, ...], Callable[[int, int], Any]]:
        return spec.dtype, spec.shape, lambda begin, end: self._taken(name, begin, end)

    # The caller.

    def write(self, name: str, tensor: Any, index: Any, payload: Callable[[str, Any], Any]) -> None:
        """Write a tensor, or consecutive rows of it."""
        self._check_open()
        if name not in self._specs:
            reason = "the file has no such tensor"
            raise located(TensorNotFoundError, reason, code="unknown-tensor", path=self._shown, tensor=name)
        spec = self._specs[name]
        # A copy, since the caller may change the tensor when this returns.
        content = serialize({name: tensor}, payload, None, "safetensors")
        info = Checkpoint.from_buffer(content, "accept", None).info(name)
        data = memoryview(content)[len(content) - info.nbytes :]
        rows, shape = self._rows(name, spec, index)
        if (info.dtype, info.shape) != (spec.dtype, shape):
            expected, found = f"{spec.dtype} of shape {[*shape]}", f"{info.dtype} of shape {[*info.shape]}"
            reason = f"expected {expected}, found {found}"
            raise located(SaveError, reason, code="mismatch", path=self._shown, tensor=name)
        begin, rest = divmod(rows.start * info.nbytes, len(rows) or 1)
        if rest:
            raise self._partial(name)
        self._put(name, rows, prod(shape), data, begin)

    def _rows(self, name: str, spec: Spec, index: Any) -> tuple[range, tuple[int, ...]]:
        """Return the rows that an index selects, and the shape of their tensor. A scalar has one row."""
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        first: Any = parts[0] if parts else ...
        others = parts[1:]
        is_whole = all(one is ... or (isinstance(one, slice) and one == slice(None)) for one in others)
        if first is ... and is_whole:
            return range(spec.shape[0] if spec.shape else 1), spec.shape
        if not is_whole or not spec.shape or not (isinstance(first, slice) or hasattr(first, "__index__")):
            raise self._partial(name)
        count, rest = spec.shape[0], spec.shape[1:]
        if isinstance(first, slice):
            rows = range(*first.indices(count))
            if rows.step != 1:
                raise self._partial(name)
            return rows, (len(rows), *rest)
        row = int(first)
        if not -count <= row < count:
            reason = f"index {row} is out of range for dimension 0 of size {count}"
            raise located(SliceError, reason, code="index-out-of-range", path=self._shown, tensor=name)
        return range(row % count, row % count + 1), rest

    def _partial(self, name: str) -> OptionError:
        message = f"write(): index: tensor {_quoted(name)}: a store takes consecutive rows of whole bytes"
        return OptionError(f"{message}, as index=slice(0, 8)", code="appended-in-part")

    def _put(self, name: str, rows: range, count: int, data: memoryview, begin: int) -> None:
        """Hand the bytes of rows to the thread, when there is room."""
        with self._changed:
            if any(rows.start < other.stop and other.start < rows.stop for other in self._ranges[name]):
                reason = "these elements were written already"
                raise located(SaveError, reason, code="filled-twice", path=self._shown, tensor=name)
            if not data:
                return
            self._start()
            place = (name, begin)
            while self._held and self._held_nbytes + len(data) > _AHEAD_NBYTES and self._awaited != place:
                if self._awaited is not None and self._awaited not in self._held:
                    raise self._out_of_order(name, self._awaited)
                self._changed.wait(_LOOK_SECONDS)
                self._check_open()
            self._missing[name] -= count
            self._ranges[name].append(rows)
            self._held[place] = data
            self._held_nbytes += len(data)
            self._changed.notify_all()

    def _out_of_order(self, name: str, awaited: tuple[str, int]) -> SaveError:
        first, begin = awaited
        reason = f"{self._held_nbytes:,} bytes wait for tensor {_quoted(first)} from its byte {begin:,} on"
        way_out = "write tensors to a store in the order of the file, by the size of their dtype and the name"
        facts: dict[str, Any] = {"expected": first, "found": name}
        return located(
            SaveError, f"{reason}: {way_out}", code="out-of-order", path=self._shown, tensor=name, **facts
        )

    def _check_open(self) -> None:
        if self._is_forked:
            reason = "this writer belongs to the process that was forked"
            raise located(ClosedError, reason, code="forked", path=self._shown)
        if self._fault is not None:
            raise self._fault
        if self._is_closed:
            raise ClosedError("file is closed", code="closed")

    def commit(self) -> None:
        """Let the thread send the last bytes, and wait for the object."""
        self._check_open()
        for name, missing in self._missing.items():
            if missing:
                raise self._unfilled(name, missing)
        with self._changed:
            self._is_committing = True
            self._start()
            self._changed.notify_all()
        try:
            self._join()
        finally:
            self.close()
        if self._fault is not None:
            raise self._fault

    def _unfilled(self, name: str, missing: int) -> SaveError:
        whole = prod(self._specs[name].shape)
        if missing == whole:
            reason = f"it was never written: expected {whole:,} elements"
            return located(SaveError, reason, code="never-filled", path=self._shown, tensor=name)
        reason = f"only a part was written: expected {whole:,} elements, found {whole - missing:,}"
        return located(SaveError, reason, code="partly-filled", path=self._shown, tensor=name)

    def close(self) -> None:
        """Discard the object if it was not committed."""
        if self._is_forked:
            return
        with self._changed:
            self._is_closed = True
            self._held.clear()
            self._changed.notify_all()
        self._join()

    def is_pending(self) -> bool:
        """Return whether the object may still be committed."""
        return not self._is_closed and self._fault is None

    def disown(self) -> None:
        """Leave the object to the parent, in a child after a fork."""
        self._is_forked = True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ingot-upload", daemon=True)
            self._thread.start()

    def _join(self) -> None:
        thread = self._thread
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_LOOK_SECONDS)

    # The thread.

    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            self._file.write()
        except BaseException as raised:
            fault = raised
        with self._changed:
            if not self._is_closed:
                self._fault = fault
            self._changed.notify_all()

    def _taken(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes of a tensor, when they are there."""
        with self._changed:
            if self._sent is not None and (name, begin, end) in self._sent:
                return self._sent[name, begin, end]
            if begin < self._ends[name]:
                reason = "another writer made or removed the object meanwhile, and the store needs all parts"
                reason += " again: write the file once more"
                raise located(StorageError, reason, code="write", path=self._shown)
            parts, at = [], begin
            while at < end:
                self._await(name, at)
                data = self._held.pop((name, at))
                taken, rest = data[: end - at], data[end - at :]
                at += len(taken)
                if rest:
                    self._held[name, at] = rest
                parts.append(taken)
                self._held_nbytes -= len(taken)
                self._changed.notify_all()
            self._ends[name], content = end, b"".join(parts)
            while not self._is_committing and not self._held and not any(self._missing.values()):
                # These are the last bytes.
                self._check_wanted()
                self._changed.wait()
            self._check_wanted()
            self._keep(name, begin, end, content)
            return content

    def _await(self, name: str, at: int) -> None:
        """Wait until the bytes of a tensor from a position on are held."""
        while (name, at) not in self._held:
            self._check_wanted()
            self._awaited = name, at
            self._changed.notify_all()
            try:
                self._changed.wait()
            finally:
                self._awaited = None

    def _check_wanted(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{_escaped(self._shown)}: the writer was closed", code="closed")

    def _keep(self, name: str, begin: int, end: int, content: bytes) -> None:
        """Keep the bytes of a small file."""
        self._sent_nbytes += len(content)
        if self._sent_nbytes > _AGAIN_NBYTES:
            self._sent = None
        if self._sent is not None:
            self._sent[name, begin, end] = content
