"""One module for each source format, with a function ``opened(path, options)`` that gives its `Contents`.

What it gives is good while the context lasts. Each imports the library that it needs, and no module imports
another's.
"""
