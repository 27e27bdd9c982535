"""``python -m ingot.compat script.py args…`` and ``python -m ingot.compat -m module args…``."""

from __future__ import annotations

import os
import runpy
import sys

from . import install

USAGE = "usage: python -m ingot.compat (script.py | -m module) [args…]"


def main(args: list[str]) -> None:
    """Run a program on ingot, in the same way as Python itself."""
    if not args or args[0] in ("-h", "--help") or (args[0] == "-m" and len(args) < 2):
        sys.exit(USAGE)
    install()
    if args[0] == "-m":
        sys.argv = args[1:]
        # Python puts the working directory there for `-m`, and has done so for this module.
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path[0] = os.path.dirname(os.path.abspath(args[0]))
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
