"""Storage for `torch.distributed.checkpoint`: it loads from ordinary files, and saves ordinary files.

>>> import torch.distributed.checkpoint as dcp
>>> state = {"wte": torch.zeros(8, 4)}
>>> dcp.load(state, storage_reader=ingot.dcp.Reader("model.safetensors"))
>>> saved = dcp.save(state, storage_writer=ingot.dcp.Writer("checkpoint"))
"""

# No other part of the package uses it.

from __future__ import annotations

from ingot._base.frameworks import missing

try:
    import torch.distributed.checkpoint as _dcp  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]


def __dir__() -> list[str]:
    return __all__
