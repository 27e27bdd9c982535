"""Readers of the source formats: functions that add the tensors of a file to `Contents`.

A module imports the library that it needs when it reads, and no module imports another.
"""
