"""Fixtures of the tests of writing."""

from support.checkpoints import checkpoint as checkpoint
from support.checkpoints import tensors as tensors
