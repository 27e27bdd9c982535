"""Excludes this folder from `pytest tests` if the libraries are not installed.

`make test-clients` fails then, since pytest reports a run without tests as an error.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDING = (
    "test_clients.py",
    "test_diffusers_loras.py",
    "test_peft_merges.py",
    "test_trainer_states.py",
    "test_trainers.py",
)
collect_ignore = [] if find_spec("transformers") else [*NEEDING]
