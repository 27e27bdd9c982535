"""Code that the framework modules share; only they and `compat` may use this room."""
