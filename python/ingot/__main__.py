"""``python -m ingot``: the command, for where it is not on the path."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
