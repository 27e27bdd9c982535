"""``ingot mem``: the memory that a model takes, dtype by dtype."""

from __future__ import annotations

from ingot._base import checks
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, printing
from ingot.cli.sources import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import TensorInfo

# Common names, with the bits of an element.
_DTYPES = {"F32": 32, "BF16, F16": 16, "8 bits": 8, "4 bits": 4}
_COLUMNS = (
    Column("dtype"),
    *(Column(title, right=True) for title in ("largest tensor", "total", "training with Adam")),
)
# Weights, gradients and two moments.
_ADAM = 4


@arguments.command(short_help="Estimate the memory of the model in several dtypes.")
@arguments.path
@printing
def command(screen: Screen, path: str) -> int:
    """Estimate the memory of the model, as stored and with floating-point tensors in other dtypes.

    Training with Adam needs weights, gradients and two moments in that dtype, and activations besides.
    """
    infos = opened(path).infos()
    rows = [("as stored", [info.nbytes for info in infos])]
    rows += [(name, [_size(info, bits) for info in infos]) for name, bits in _DTYPES.items()]
    facts = [(name, max(sizes, default=0), sum(sizes), _ADAM * sum(sizes)) for name, sizes in rows]
    keys = ("dtype", "largest_tensor", "total", "training")
    screen.answer({"memory": [dict(zip(keys, fact, strict=True)) for fact in facts]})
    screen.table(_COLUMNS, [(name, *map(screen.size, numbers)) for name, *numbers in facts])
    return 0


def _size(info: TensorInfo, bits: int) -> int:
    # Quantised tensors are not converted, so they keep their size.
    is_float = info.dtype in checks.FLOATS
    return -(-info.parameter_count * bits // 8) if is_float else info.nbytes
