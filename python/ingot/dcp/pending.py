"""A save that another rank's failure ends: torch does not tell the storage of the coordinator."""

from __future__ import annotations

import sys
import threading
import time
from weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from .writer import Writer

# The function of torch that calls all methods of a writer for one save.
_CALLER = "_save_state_dict"
_LOOK_SECONDS = 0.2


def watch(writer: Writer) -> None:
    """Give the save of `writer` up when torch's call for it has ended without `finish`."""
    thread = threading.get_ident()
    call = next((id(frame) for frame in _frames(thread) if frame.f_code.co_name == _CALLER), None)
    if call is not None:
        threading.Thread(
            target=_watch, args=(ref(writer), thread, call), name="ingot-pending-save", daemon=True
        ).start()


def _watch(writer: ref[Writer], thread: int, call: int) -> None:
    while any(id(frame) == call for frame in _frames(thread)):
        time.sleep(_LOOK_SECONDS)
        pending = writer()
        if pending is None or not pending._is_pending():
            return
        del pending
    pending = writer()
    if pending is not None:
        pending._give_up()


def _frames(thread: int) -> Iterator[FrameType]:
    """Return the calls that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back
