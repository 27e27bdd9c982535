"""``python -m ingot``: run the command if it is not on the path."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
