"""Fixtures of the tests of reading."""

from support.checkpoints import checkpoint as checkpoint
from support.checkpoints import tensors as tensors
