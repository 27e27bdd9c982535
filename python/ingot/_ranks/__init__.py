"""Placements, plans and messages of tensors on several ranks. Only `local` and `peers` import torch."""
