"""A tensor of an open file, to be read in part."""

from __future__ import annotations

from typing import Any, Generic

from ingot._base.frameworks import adapter as adapter_of
from ingot._base.report import restored
from ingot._base.text import _quoted

from .load import Value, part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import numpy

    from ingot._base.frameworks import Adapter
    from ingot._native import Checkpoint, TensorInfo

    from .moves import Move, Placement

# What opens a handle again, and what it is called with.
Again: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"


class TensorSlice(Generic[Value]):
    """A tensor of an open file, to be read in part. `safe_open.get_slice` makes them.

    It has the attributes of an array, so that what takes array-likes takes it: ``numpy.asarray(part)`` reads
    all of the tensor, ``dask.array.from_array(part)`` the parts that it is asked for.

    It can be pickled as its handle can, also when that was closed: the file is opened again where it arrives.
    """

    # Where it is found by its name, as a pickle looks for it.

    __slots__ = ("_adapter", "_again", "_checkpoint", "_info", "_move")

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: TensorInfo,
        adapter: Adapter,
        move: Move | Placement | None,
        again: Callable[[], Again | None],
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._adapter = adapter
        self._move = move
        self._again = again

    def get_shape(self) -> list[int]:
        """Give the shape of the whole tensor, as it stands in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Give the dtype as its code in the header, such as ``"BF16"``."""
        return self._info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, as it stands in the header."""
        return self._info.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self._info.shape)

    @property
    def dtype(self) -> Any:
        """The framework's dtype, such as ``torch.bfloat16``; `get_dtype` gives the code in the header.

        Raises
        ------
        DtypeError
            The framework lacks the dtype.
        """
        # Of no elements, where it has dimensions: nothing is read.
        none: Any = self[0:0] if self.ndim else self[()]
        return none.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        """Read all of the tensor into a NumPy array, whatever the framework and the device of the handle.

        Parameters
        ----------
        dtype : numpy.dtype, optional
            What to convert it to.
        copy : bool, optional
            True gives memory of its own. By default and with False it is a view of the file where that is
            mapped.

        Raises
        ------
        ValueError
            `copy` is False and the array cannot be a view.
        DtypeError
            NumPy lacks the dtype, or ml_dtypes is not installed.
        StorageError
            Reading failed.
        """
        array = self._checkpoint.tensor(self._info.name, adapter_of("numpy").wrap)
        # `F4` is unpacked, and else only a mapping gives the same memory twice.
        is_view = self._checkpoint.backend == "mmap" and self._info.dtype != "F4"
        if copy is False and not (is_view and (dtype is None or dtype == array.dtype)):
            raise ValueError(f"tensor {_quoted(self._info.name)}: an array of it would be a copy")
        found: numpy.ndarray[Any, Any] = array if dtype is None else array.astype(dtype, copy=False)
        return found.copy() if copy and is_view and found is array else found

    def __getitem__(self, index: Any) -> Value:
        """Read the part of the tensor that `index` selects.

        Parameters
        ----------
        index : int, slice, None, ``...``, range, list of int or range, or a tuple of these
            By the rules of NumPy's basic indexing, and one list of positions, in which a range means all of
            its positions. Only the selected bytes are read. Whatever else the framework can index by (masks,
            arrays, several lists) is left to it: the whole tensor is read, or mapped, and indexed.

        Returns
        -------
        array or tensor of the framework
            A single element is a 0-dimensional array. Where `safe_open.get_tensor` gives a view of the mapped
            file, ints, slices, None and ``...`` give one too, with strides as NumPy's own slices have; only
            paddle, TensorFlow and mlx get copies of parts that are not contiguous. A list of positions gives
            a copy of what the file holds, in C order, and so does every index where the file is not mapped.

        Raises
        ------
        SliceError
            The index does not fit the shape; a step is negative; elements of less than a byte are cut inside
            a byte.
        DtypeError, StorageError
            As `safe_open.get_tensor` does.
        """
        found: Value = part(
            self._checkpoint, self._info.name, index, self._adapter.wrap, self._move, self._adapter.at
        )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, ("TensorSlice._opened", (*known(self._again()), self._info.name))

    @classmethod
    def _opened(cls, opens: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> TensorSlice[Any]:
        opened: TensorSlice[Any] = opens(*arguments).get_slice(name)
        return opened

    def __repr__(self) -> str:
        return f"<slice of tensor {_quoted(self._info.name)}: {self._info.dtype} {self.get_shape()}>"


def known(again: Again | None) -> Again:
    """`again`, if there is one."""
    if again is None:
        raise TypeError("cannot pickle a handle that was made from an open file: make it with its path")
    return again
