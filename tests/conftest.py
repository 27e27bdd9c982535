"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadline: a busy machine is not a bug. The same examples each time, so that what passed passes again;
# `pytest --hypothesis-profile=deep` looks for new ones.
settings.register_profile("ingot", deadline=None, derandomize=True)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile("ingot")
