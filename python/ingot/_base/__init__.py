"""Text, dtypes, argument checks, progress and HTML; every other room may use this one."""
