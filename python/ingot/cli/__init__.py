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
        0: done, and all is well. 1: a file is invalid, files differ, a check found something, or reading or
        writing failed. 2: the command cannot be carried out as it was typed: an unknown option, a file or a
        tensor that is not there, a destination that is and no ``--overwrite``, a package that is missing. 130
        after Ctrl-C, 141 where the reader of the output has gone.
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
