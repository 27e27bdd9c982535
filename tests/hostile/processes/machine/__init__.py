"""Files and open handles under any order of everything that writes files, held against dicts.

`Files` is a state machine of hypothesis. Its model of a file is a dict of arrays, all of which are numbered,
so that bytes of one save tell from those of any other. Its model of an open handle is that of the file that
was opened: whatever is done to the file since, the handle gives those bytes or says that it was changed.

`content` is what a file has to hold, `drawn` what hypothesis chooses from, `folder` the files of one machine;
`saves`, `edits`, `writers` and `reads` are its rules.
"""

from __future__ import annotations

from .edits import Edits
from .helpers import helpers
from .reads import Reads
from .saves import Saves
from .writers import Writers

__all__ = ["Files", "helpers"]


class Files(Saves, Edits, Writers, Reads):
    """A folder with a few files and checkpoints in it, and handles that are open on what was there."""
