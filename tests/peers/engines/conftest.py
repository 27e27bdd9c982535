"""Exclude tests that need the engines from `pytest tests`. `make test-engines` runs them.

`make test-engines` names these files, and fails if the engines are missing.
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
