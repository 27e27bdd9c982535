"""Files made of the tensors of other files, whose bytes are copied and never decoded."""

from __future__ import annotations

from .names import chosen as chosen
from .rearrange import ON_DUPLICATE as ON_DUPLICATE
from .rearrange import merge as merge
from .rearrange import rewrite as rewrite
from .rearrange import split as split
from .repair import Finding as Finding
from .repair import Repair as Repair
from .repair import examined as examined
from .repair import repair as repair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .names import Which as Which
