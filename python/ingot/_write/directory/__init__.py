"""A directory with a checkpoint: its lock, files that have no names of their own yet, and files of parts."""
