"""A folder of checkpoints: steps with commit files, the lease of the writer, and which steps are kept."""
