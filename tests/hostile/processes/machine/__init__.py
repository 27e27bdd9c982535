"""Files and open handles under any order of everything that writes files, held against dicts.

`Files` is a state machine of hypothesis. Its model of a file is a dict of arrays. All arrays are numbered,
so that the bytes of each save are unique. Its model of an open handle is the model of the file that
was opened: after any later change of the file, the handle returns those bytes or raises an error.

`content` has the expected contents, `drawn` the choices of hypothesis, `folder` the files of one machine;
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
    """A folder with a few files and checkpoints, and open handles on them."""
