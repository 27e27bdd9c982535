"""Tensors that are loaded: which, how much of each, as what, to where, and who is told."""

from .faults import about as about
from .faults import in_file as in_file
from .faults import misfit as misfit
from .faults import no_destination as no_destination
from .loading import Value as Value
from .loading import chosen as chosen
from .loading import fill as fill
from .loading import load as load
from .loading import part as part
from .loading import refuse_unproven as refuse_unproven
from .loading import tensor as tensor
from .loading import tensors as tensors
from .moves import Carrier as Carrier
from .moves import Placement as Placement
from .moves import landing as landing
from .moves import moved as moved
from .moves import placing as placing
from .moves import settled as settled
from .reads import PLAIN as PLAIN
from .reads import Reads as Reads
from .reads import reading as reading
from .selected import Label as Label
from .selected import Selected as Selected
from .selected import Wanted as Wanted
from .selected import wanted as wanted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loading import Into as Into
    from .loading import Memory as Memory
    from .moves import Move as Move
    from .moves import Onto as Onto
