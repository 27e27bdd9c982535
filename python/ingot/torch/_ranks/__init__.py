"""Tensors that several ranks hold together: which part is whose, and how ranks read and write them.

`load_into` and `save_sharded` of `ingot.torch`, and `ingot.dcp`, use what is here.
"""
