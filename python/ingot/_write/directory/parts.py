"""Files that hold parts of tensors, and their replacement by the files of another save.

No index names such files: all in a directory are one checkpoint. So while some of them are replaced, a
manifest in the directory names the files of the old checkpoint, under second names that are hidden. Readers
use the manifest if there is one. The removal of the manifest makes the new files the checkpoint.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress

from ingot._base.text import _escaped
from ingot._native import replace_file
from ingot.errors import CheckpointError

from .hidden import PREFIX, hidden

#: A file of parts, as torch's Hugging Face storage names them.
PART = re.compile(r"shard-[0-9]{5,}-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
#: The file that names the old checkpoint while it is replaced.
MANIFEST = ".ingot-parts.json"


def part_files(directory: str) -> list[str]:
    """Return the names of the files of parts in a directory, sorted."""
    return [name for name in sorted(os.listdir(directory)) if PART.fullmatch(name)]


def listed(directory: str) -> list[str] | None:
    """Return the names that the manifest of a directory lists. None if there is no manifest.

    Raises `CheckpointError` if the old checkpoint has been lost, on a file system without hard links.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            names = json.load(file)["files"]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as fault:
        raise _lost(path, f"it cannot be read ({type(fault).__name__})") from None
    if names is None:
        raise _lost(path, "a save that replaced files did not end")
    return [*map(str, names)]


def _lost(path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{_escaped(path)}: {reason}: the files are not of one checkpoint: save again with overwrite=True",
        code="invalid-parts",
        path=path,
    )


def keep(directory: str, old: list[str], durable: bool) -> list[str]:
    """Write the manifest, link the old files to the names that it lists, and return these names."""
    links: list[str] = []
    has_links = True
    with hidden() as prefix:
        try:
            for name in old:
                os.link(os.path.join(directory, name), os.path.join(directory, prefix + name))
                links.append(prefix + name)
        except OSError:
            # Without hard links, the old checkpoint is lost if this process is killed from here on.
            has_links = False
        beside = os.path.join(directory, prefix + MANIFEST)
        manifest = json.dumps({"files": links if has_links else None})
        replace_file(beside, [manifest.encode()], durable=durable)
        os.replace(beside, os.path.join(directory, MANIFEST))
    return links


def recover(directory: str) -> None:
    """Restore the names of the old files if a replacement did not end. The caller holds the lock."""
    try:
        links = listed(directory)
    except CheckpointError:
        # Readers reject the directory until a save replaces its files.
        return
    if links is None:
        return
    finals = {PREFIX.sub("", link, count=1): link for link in links}
    with hidden() as prefix:
        for name, link in finals.items():
            beside = os.path.join(directory, prefix + name)
            os.link(os.path.join(directory, link), beside)
            os.replace(beside, os.path.join(directory, name))
            # Where both were one file already, the system leaves both names.
            with suppress(FileNotFoundError):
                os.remove(beside)
    for name in part_files(directory):
        if name not in finals:
            os.remove(os.path.join(directory, name))
    os.remove(os.path.join(directory, MANIFEST))
