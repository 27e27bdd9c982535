"""What the tests here share."""

from support.checkpoints import checkpoint as checkpoint
