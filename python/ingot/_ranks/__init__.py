"""Placements, plans and messages of tensors on several ranks; only `torch` and `dcp` may use this room."""
