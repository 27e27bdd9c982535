"""Failures of background saves that the program has not asked about."""

from __future__ import annotations

import sys


class Outcome:
    """How a background save ended.

    Attributes
    ----------
    fault : str
        The failures, with the paths. Empty if there are none.
    is_asked : bool
        Whether the program has asked for the result since the future is done.
    is_warned : bool
        Whether a warning has been issued.
    """

    __slots__ = ("fault", "is_asked", "is_warned")

    def __init__(self) -> None:
        self.fault = ""
        self.is_asked = self.is_warned = False


_FAILED: list[Outcome] = []


def record(outcome: Outcome, fault: str) -> None:
    """Keep a failure until the program asks about it, and print it at exit if it never does."""
    outcome.fault = fault
    if not _FAILED:
        import atexit
        import os

        atexit.unregister(_print)
        atexit.register(_print)
        if hasattr(os, "register_at_fork"):
            # The parent reports its own failures.
            os.register_at_fork(after_in_child=_FAILED.clear)
    _FAILED[:] = [*_unasked(), outcome]


def warn() -> None:
    """Warn of each failure once."""
    for outcome in _unasked():
        if not outcome.is_warned:
            import warnings

            outcome.is_warned = True
            warnings.warn(f"a background save failed: {outcome.fault}", RuntimeWarning, stacklevel=4)


def _unasked() -> list[Outcome]:
    return [outcome for outcome in _FAILED if not outcome.is_asked]


def _print() -> None:
    for outcome in _unasked():
        if sys.stderr is not None:
            print(f"ingot: a background save failed: {outcome.fault}", file=sys.stderr)
