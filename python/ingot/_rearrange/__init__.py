"""Files made of the tensors of other files, whose bytes are copied and never decoded."""

from __future__ import annotations

from .names import chosen as chosen
from .rearrange import ON_DUPLICATE as ON_DUPLICATE
from .rearrange import merge as merge
from .rearrange import rewrite as rewrite
from .rearrange import split as split
from .salvage import Finding as Finding
from .salvage import Repair as Repair
from .salvage import examined as examined
from .salvage import repair as repair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .names import Which as Which
