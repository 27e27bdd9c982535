"""The command `ingot`: look at files of tensors, check, compare, change and convert them, from a shell.

It needs click, which ``pip install 'ingot-tensors[cli]'`` installs. Nothing of `ingot` imports it.
"""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit status.

    Returns
    -------
    int
        0: success. 1: a file is invalid, files differ, a check found a problem, or reading or writing failed.
        2: the command cannot be carried out as typed: an unknown option, a missing file or tensor, an
        existing destination without ``--overwrite``, or a missing package. 130 after Ctrl-C, 141 if the
        reader of the output has closed the pipe.
    """
    # Lists of 500,000 tensors are not garbage, and scanning them repeatedly takes time.
    gc.set_threshold(200_000)
    try:
        from .program import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "click":
            raise
        from ingot._base.frameworks import installing

        sys.stderr.write(f"error: the command needs click: {installing('cli')}\n")
        return 2
