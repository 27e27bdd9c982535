"""Names of files for tensors. A name from a file is only a name: it never becomes a path."""

from __future__ import annotations

from urllib.parse import quote

# Bytes that file systems take for a name, with room for numbers and suffixes.
_LONGEST = 200
# What Windows takes for devices, whatever follows the dot.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10))}


def distinct(names: list[str], suffix: str) -> list[str]:
    """A file name for each of `names`, all of them different also where case does not count."""
    taken: set[str] = set()
    files = []
    for name in names:
        stem = _stem(name)
        file, number = f"{stem}.{suffix}", 1
        while file.lower() in taken:
            number += 1
            file = f"{stem}-{number}.{suffix}"
        taken.add(file.lower())
        files.append(file)
    return files


def _stem(name: str) -> str:
    """`name` with everything but letters, digits, ``-``, ``_`` and ``.`` of ASCII as %XX."""
    # `quote` leaves `~` as it is, which a shell does not.
    stem = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    if stem.startswith(".") or not stem:
        # Neither hidden nor a directory.
        stem = "%2E" + stem[1:] if stem else "%00"
    if stem.partition(".")[0].lower() in _DEVICES:
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if stem.startswith("-"):
        # An option to whatever command is given the file next.
        stem = "%2D" + stem[1:]
    return _cut(stem)


def _cut(stem: str) -> str:
    if len(stem) <= _LONGEST:
        return stem
    cut = stem[:_LONGEST]
    # Not within %XX.
    return cut[: cut.rindex("%")] if "%" in cut[-2:] else cut
