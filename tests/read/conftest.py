"""What the tests here share."""

from support.checkpoints import checkpoint as checkpoint
from support.checkpoints import tensors as tensors
