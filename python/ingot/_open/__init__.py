"""What is open for reading: `door` opens it, callers hold a `handle`, the others read from that."""

from .ahead import AHEAD as AHEAD
from .ahead import TensorIterator as TensorIterator
from .documents import read_index as read_index
from .documents import read_metadata as read_metadata
from .door import BACKENDS as BACKENDS
from .door import TRIES as TRIES
from .door import again_by as again_by
from .door import loaded as loaded
from .door import open_all as open_all
from .door import open_checkpoint as open_checkpoint
from .door import open_source as open_source
from .handle import safe_open as safe_open
from .handle import warm as warm
from .loader import PrefetchLoader as PrefetchLoader
from .loader import TensorStream as TensorStream
from .part import Again as Again
from .part import TensorSlice as TensorSlice
