"""Keeps `pytest tests` out of what needs the engines, which `make test-engines` has.

`make test-engines` fails where they are missing: it names these files.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [
    file
    for file, module in (
        ("test_vllm.py", "vllm"),
        ("test_sglang.py", "sglang"),
        ("test_lightning.py", "lightning"),
    )
    if not find_spec(module)
]
