"""The viewer: `shelf` holds the files, `server` serves their bytes to the page.

Only `cli` may import this package.
"""
