"""Sources, open files, loads, inspection and digests; every room except `_base` may use this one."""
