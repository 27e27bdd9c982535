"""Saves, writers, edits, repairs and downloads; every room except `_base` and `_read` may use this one."""
