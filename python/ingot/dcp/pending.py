"""A save that another rank's failure ends, which torch does not report to the coordinator's storage.

torch 2.15 calls no method of a writer when another rank has failed, so a thread looks whether torch's call
is still running. What else was considered:

- A finalizer on the list that `Writer.write_data` returns runs when torch's call ends, but not while the
  traceback of its exception is referenced: a save that is repeated in the ``except`` block would wait for the
  directory's lock.
- Meeting the other ranks in `Writer.write_data` needs the process group of the save, which torch does not
  pass, and hangs with ``no_dist=True``.
- Pickled exceptions of other ranks could report the failure when the coordinator reads them, but planners
  fail too, in `finish_plan`, with exceptions that are not ours.
- `sys.monitoring` (Python 3.12) reports unwinding for all code or for none.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from ingot.errors import SaveError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from types import FrameType

# The function of torch that calls all methods of a writer for one save.
_CALLER = "_save_state_dict"
_LOOK_SECONDS = 0.2


def give_up(saving: ExitStack) -> None:
    """Remove what a save has written that does not come to its end."""
    error = SaveError("the save was given up", code="abandoned")
    saving.__exit__(type(error), error, None)


def watch(pending: list[ExitStack]) -> None:
    """Give the pending save up when torch's call for it has ended and the save is still in the list."""
    thread = threading.get_ident()
    call = next((id(frame) for frame in _frames(thread) if frame.f_code.co_name == _CALLER), None)
    if call is not None:
        given = pending, pending[0], thread, call
        threading.Thread(target=_watch, args=given, name="ingot-pending-save", daemon=True).start()


def _watch(pending: list[ExitStack], saving: ExitStack, thread: int, call: int) -> None:
    while saving in pending and any(id(frame) == call for frame in _frames(thread)):
        time.sleep(_LOOK_SECONDS)
    with suppress(ValueError):
        pending.remove(saving)
        give_up(saving)


def _frames(thread: int) -> Iterator[FrameType]:
    """Return the calls that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back
