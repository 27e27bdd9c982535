"""A file of tensors, or a checkpoint of many, open for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import fsdecode
from os.path import basename
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from ingot._base.checks import is_path, leniency
from ingot._base.frameworks import FRAMEWORKS, adapter
from ingot._base.keys import select
from ingot._base.options import DEFAULT_LOADING, Loading, checked, takes
from ingot._base.report import restored
from ingot._base.text import _escaped, _quoted, nbytes, plural
from ingot._native import Checkpoint, Gpu, TensorInfo, in_natural_order, why_pageable, why_uncached
from ingot.errors import ClosedError, HeaderError, TensorNotFoundError
from ingot.typing import Device, Framework, Keys, NoOptions, OpenOptions, Path, Source, StorageOptions

from .door import again_by, open_checkpoint
from .load import Value, part, tensor, tensors
from .loader import AHEAD, PrefetchLoader, planned
from .moves import Moving, placed, settled

if TYPE_CHECKING:
    import jax
    import mlx.core as mlx
    import numpy
    import paddle
    import tensorflow
    import torch

    from ingot._base.frameworks import Adapter
    from ingot._base.keys import Selector


# The function that opens a handle again, and its arguments.
Again: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"


class TensorSlice(Generic[Value]):
    """A tensor of an open file whose parts can be read. `safe_open.get_slice` returns it.

    It has the attributes of an array, so array functions accept it: ``numpy.asarray(part)`` reads all of the
    tensor, ``dask.array.from_array(part)`` reads the requested parts.

    It can be pickled if its handle can, even after the handle was closed. Unpickling opens the file again.

    Examples
    --------
    >>> with ingot.open("model.safetensors") as file:
    ...     part = file.get_slice("wte")
    >>> part.shape, part[:2, ::2].tolist()
    ((8, 4), [[0.0, 2.0], [4.0, 6.0]])
    >>> numpy.asarray(part).shape
    (8, 4)
    """

    # Pickles find the class by this name.

    __slots__ = ("_adapter", "_again", "_checkpoint", "_info", "_move")

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: TensorInfo,
        adapter: Adapter,
        move: Moving,
        again: Callable[[], Again | None],
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._adapter = adapter
        self._move = move
        self._again = again

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor in the header.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.get_slice("wte").get_shape())
        [8, 4]
        """
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Return the code of the dtype in the header, such as ``"BF16"``.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.get_slice("wte").get_dtype())
        F32
        """
        return self._info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the header."""
        return self._info.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self._info.shape)

    @property
    def dtype(self) -> Any:
        """The framework's dtype, such as ``torch.bfloat16``; `get_dtype` returns the code in the header.

        Raises
        ------
        DtypeError
            The framework lacks the dtype.
        """
        # Make an empty tensor, unless it has no dimensions, so that no data is read.
        none: Any = self[0:0] if self.ndim else self[()]
        return none.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        """Read the whole tensor into a NumPy array, for any framework and device of the handle.

        Parameters
        ----------
        dtype : numpy.dtype, optional
            The dtype of the array. By default the dtype of the file.
        copy : bool, optional
            If True, the array has its own memory. Otherwise it is a view of the file if the file is mapped.

        Raises
        ------
        ValueError
            `copy` is False and the array cannot be a view.
        DtypeError
            NumPy lacks the dtype, or ml_dtypes is not installed.
        StorageError
            Reading failed.
        """
        array = self._checkpoint.tensor(self._info.name, adapter("numpy").wrap)
        # An array is a view if the file is mapped; `F4` is always unpacked into a copy.
        is_view = self._checkpoint.backend == "mmap" and self._info.dtype != "F4"
        if copy is False and not (is_view and (dtype is None or dtype == array.dtype)):
            raise ValueError(f"tensor {_quoted(self._info.name)}: an array would be a copy")
        found: numpy.ndarray[Any, Any] = array if dtype is None else array.astype(dtype, copy=False)
        return found.copy() if copy and is_view and found is array else found

    def __getitem__(self, index: Any) -> Value:
        """Read the part of the tensor that `index` selects.

        Parameters
        ----------
        index : int, slice, None, ``...``, range, list of int or range, or a tuple of these
            By the rules of NumPy's basic indexing, and one list of positions, in which a range means all of
            its positions. Only the selected bytes are read. For the framework's other indices (masks, arrays,
            several lists) the whole tensor is read or mapped, and the framework indexes it.

        Returns
        -------
        array or tensor of the framework
            A single element is a 0-dimensional array. If `safe_open.get_tensor` returns a view of the
            mapped file, ints, slices, None and ``...`` return a view too, with the strides of NumPy's slices;
            paddle, TensorFlow and mlx copy parts that are not contiguous. A list of positions returns a copy
            in C order, and so does every index if the file is not mapped.

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
    """Return `again`. Raise if it is None."""
    if again is None:
        raise TypeError("cannot pickle a handle that was made from an open file: make it with its path")
    return again


Other = TypeVar("Other")


def _check_pickles(path: str, provider: object) -> None:
    """Raise a `TypeError` that names the reason, unless a provider of credentials can be pickled."""
    from pickle import dumps

    try:
        dumps(provider)
    except Exception as error:
        reason = f"the `credentials` of its storage_options cannot be pickled ({error})"
        message = f"cannot pickle the handle of {_escaped(path)}: {reason}: give a function of a module"
        raise TypeError(message) from error


class safe_open(Mapping[str, Value]):
    """A file, or a checkpoint of many files, that is open for reading tensors one by one.

    `ingot.open` is the same as a function.

    Parameters
    ----------
    filename : ingot.typing.Source
        What to open. ``str``, ``bytes`` or ``os.PathLike``: the path of a `.safetensors` or a `.bt` file,
        whose content decides which it is; the index of a sharded checkpoint
        (``model.safetensors.index.json``), whose shards become one handle; or a directory. In a directory,
        the first of these that exists is opened: ``model.safetensors.index.json``, the only other
        ``*.safetensors.index.json``, ``model.safetensors``, the only other file of tensors.

        A str that begins with ``http://``, ``https://``, ``hf://``, ``s3://``, ``gs://`` or ``az://``: the
        URL of a file, or of an index with its shards beside it. The header is fetched at once, and tensors
        when they are read. ``hf://owner/repo`` is the repository's ``model.safetensors`` or, if it has none,
        its ``model.safetensors.index.json``. ``file://`` is the path of a file.

        An object that holds one file: a buffer (but `bytes` are a path); a file that is open for reading
        bytes, with ``read``, ``seek`` and ``tell``, such as a member of a zip; a file of fsspec,
        ``fsspec.open("gcs://bucket/model.safetensors")``; or `ingot.Ranges`, a file in any store. The notes
        say how these are read.
    framework : str
        The framework of the tensors: ``"numpy"`` or ``"np"``, the default; ``"torch"``, ``"pt"`` or
        ``"pytorch"``; ``"jax"`` or ``"flax"``; ``"tensorflow"`` or ``"tf"``; ``"mlx"``; ``"paddle"``.
    device : str, int, the framework's device, dict or callable
        Where the tensors are placed. On ``"cpu"``, the default, they are views of the file if the backend
        maps it. Tensors on a GPU of torch are read through pinned memory, with any backend, in the order of
        the current stream of the calling thread. Tensors on torch's other accelerators and on shardings of
        jax are copied in pieces, and tensors on any other device in one copy. NumPy supports only ``"cpu"``.
        A dict maps patterns of names to devices: ``{"layers.0.*": "cuda:0", "*": "cpu"}``. ``*`` is any text
        and ``?`` one character. The first match decides, and each pattern must match a tensor. A callable
        receives the result of `info` and returns the device.
    backend : {"auto", "mmap", "pread"}
        How the file is read. ``"mmap"`` maps it, copy on write: tensors can be written to, the file never
        changes. ``"pread"`` reads into memory that ingot owns, without the page cache for uncached bytes.
        ``"auto"`` maps files on local disks, so that all processes share their pages and later processes find
        them in the page cache. It reads files that come over a network or through FUSE.
        ``INGOT_BACKEND`` in the environment decides where this is ``"auto"``; `backend` and `why` of the
        handle report the choice.
    strict : bool
        Also refuse harmless headers that are not in the form for writers (FORMAT.md, "Lenient and strict").
    lenient : bool
        Read the sound tensors of a file that breaks rules, as `ingot.repair` does. `unsound` has the other
        tensors. For a sharded checkpoint, `keys` lists the names of the index, and `offset_keys` the sound
        ones.
    max_header_size : int, optional
        Refuse longer headers, in bytes. 100,000,000 by default, as upstream; 25,000,000 for URLs.
    confine : bool
        Refuse symbolic links below the directory of `filename`, and files with a second name
        (hard links). By default links are followed, because the cache of the Hub is made of them. An index
        that names files outside of its directory is always refused. Has no effect for URLs.
    storage_options : dict, optional
        How a URL is reached: token, headers, keys, timeouts (`ingot.StorageOptions`).

    Raises
    ------
    OSError
        The file cannot be opened: `FileNotFoundError`, `PermissionError` and so on. `FileNotFoundError` names
        the shards that are missing. `IsADirectoryError`: a directory without a checkpoint.
    HeaderError
        The file breaks a rule of its format; ``code`` says which.
    CheckpointError
        The index breaks a rule (FORMAT.md, I1 to I8), the shards differ from the index, or the directory
        holds several checkpoints.
    OptionError
        `framework`, `device`, `backend` or ``INGOT_BACKEND`` is not one of the choices, or a URL
        has another scheme. Also raised on reading a tensor whose name no pattern of `device` matches.
    ImportError
        The framework is not installed. The message has the command that installs it.

    Notes
    -----
    A `safe_open` is a context manager, and also works without ``with``. It is a `collections.abc.Mapping`
    from name to tensor:
    ``len(file)``, ``name in file``, ``for name in file``, ``file[name]``, ``file.get(name)``,
    ``file.items()``; the last two read the tensors one by one. Unlike a dict, it is equal to itself
    only, and `keys` returns a list, as upstream's. To type checkers its values are the framework's tensors
    where `framework` is a literal, such as ``"pt"``; a notebook shows it as a tree and completes its names.

    After `close` every method raises `ClosedError`; tensors and slices that were taken before remain good. A
    handle can be used from many threads at once, and pickled, as its slices can: it is then opened again, by
    its path, where it arrives, such as in the workers of a ``DataLoader``.

    Opening a sharded checkpoint reads its index, finds all its shards and reads the header of the first. The
    header of each other shard is read when the shard is first needed, and compared with the index: a shard
    that lacks a tensor of the index, or has another one, is refused (`CheckpointError`). Calls that need all
    shards, such as `get_tensors`, `offset_keys`, `parameter_count` and every `load_file`, compare all of them
    with the index; `keys` lists the names of the index. If ``total_size`` in the index is wrong, every
    function that reads all tensors warns (`UserWarning`).

    A handle reads the version of the files that it opened, also after a save has replaced them. The only file
    of a checkpoint stays open. For checkpoints in shards, a process keeps at most 48 files open, or a quarter
    of its limit of descriptors. Beyond that, it closes the least recently read files. The shards of a larger
    index are opened when they are first read. If a closed file was replaced,
    removed or written to, reading it raises `StorageError` (``code`` is ``"changed"``): open the checkpoint
    again, as ``load_file`` does by itself.

    An object is read as a URL is: the header, then the requested bytes,
    several ranges at a time if the object is a store. The handle holds the object and
    never closes it. Reads of an open file are serialised and move its position, so do not use it for anything
    else. A buffer cannot be resized while the handle exists; a `io.BytesIO` can. An exception of the object
    becomes the cause of a `StorageError` that names the object, and an answer that is too short or too long
    raises `StorageError` too. After each read, the store is asked for the version of the file, if it reports
    versions; for an open file only a changed size is noticed. Pickling a handle pickles the object with it.
    In a child after a fork, handles that were opened before raise `ClosedError` (``"forked"``), except those
    in memory: open the file again there.

    Opening a remote index fetches only the index; `format` is then derived from the names of the shards. A
    shard that is missing raises `FileNotFoundError` when it is first needed, with its URL. On the Hub, all
    shards are read from the same commit as the index.

    Examples
    --------
    >>> with ingot.safe_open("model.safetensors", framework="np") as file:
    ...     for name in file.keys():
    ...         print(name, file.get_tensor(name).shape)
    lm_head.weight (8, 4)
    wte (8, 4)
    """

    __slots__ = ("__weakref__", "_adapter", "_arguments", "_checkpoint", "_given", "_move")

    @overload
    def __init__(
        self: safe_open[numpy.ndarray[Any, numpy.dtype[Any]]],
        filename: Source,
        framework: Literal["numpy", "np"] = "numpy",
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[torch.Tensor],
        filename: Source,
        framework: Literal["torch", "pt", "pytorch"],
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[jax.Array],
        filename: Source,
        framework: Literal["jax", "flax"],
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[tensorflow.Tensor],
        filename: Source,
        framework: Literal["tensorflow", "tf"],
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[mlx.array],
        filename: Source,
        framework: Literal["mlx"],
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[paddle.Tensor],
        filename: Source,
        framework: Literal["paddle"],
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[Any],
        filename: Source,
        framework: Framework,
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @takes(OpenOptions)
    def __init__(
        self,
        filename: Source,
        framework: Framework = "numpy",
        device: Device = "cpu",
        **options: Unpack[OpenOptions],
    ) -> None:
        how, given = DEFAULT_LOADING, {}
        # Programs open thousands of files without options.
        is_known = isinstance(framework, str) and framework in FRAMEWORKS and is_path(filename)
        if options or not is_known:
            own = {"filename": filename, "framework": framework}
            given = checked(safe_open.__init__, {**options, **own})
            how = Loading.among(given)
        self._adapter = adapter(framework)
        self._move = placed(safe_open.__init__, self._adapter.mover, device)
        tolerance = leniency(given.get("strict", False), given.get("lenient", False))
        self._checkpoint = open_checkpoint(filename, how, tolerance, confine=given.get("confine", False))
        self._given = filename
        if how.remap is not None:
            # The rules may have been an iterator.
            options["remap"] = how.remap
        self._arguments = (framework, device, options)

    def keys(self) -> list[str]:  # type: ignore[override]
        """Return the tensor names in sorted order.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.keys())
        ['lm_head.weight', 'wte']
        """
        return self._checkpoint.names()

    def offset_keys(self) -> list[str]:
        """Return the tensor names in the order of their data, file after file.

        Examples
        --------
        >>> arrays = {"a": numpy.ones(1, "float32"), "b": numpy.ones(1, "float64")}
        >>> ingot.numpy.save_file(arrays, "mixed.safetensors")
        >>> with ingot.open("mixed.safetensors") as file:
        ...     print(file.keys(), file.offset_keys())
        ['a', 'b'] ['b', 'a']
        """
        return self._checkpoint.offset_names()

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata that is stored beside the tensors.

        Returns
        -------
        dict of str to str, or None
            A new dict, or None if the file has no metadata. For a sharded checkpoint the metadata of the
            index, whose values may be any JSON, such as the int ``total_size``; `shard_metadata` has the
            metadata of the files.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.metadata())
        {'format': 'pt'}
        """
        return self._checkpoint.metadata()

    def shard_metadata(self) -> dict[str, dict[str, str] | None]:
        """Return the metadata of each file.

        Returns
        -------
        dict of str to dict or None
            The keys are the file names in the index. A single file has its own name.

        Raises
        ------
        HeaderError, CheckpointError, StorageError
            A file that had to be opened cannot be used.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.shard_metadata())
        {'model.safetensors': {'format': 'pt'}}
        """
        return self._checkpoint.shard_metadata()

    @property
    def unsound(self) -> dict[str, HeaderError]:
        """The tensors that cannot be read, each with the error that reading it raises.

        Empty unless the handle was opened with ``lenient=True``: otherwise a file with such a tensor is
        refused. `ingot.repair` reports all other faults of a file.

        Raises
        ------
        HeaderError, CheckpointError, StorageError
            A file that had to be opened cannot be used.
        """
        return self._checkpoint.unsound()

    @property
    def shards(self) -> list[str]:
        """The paths of the files, in the order of their names. One path if there is no index."""
        return self._checkpoint.shards

    @takes()
    def shard_of(self, name: str, **options: Unpack[NoOptions]) -> str:
        """Return the path of the file that holds a tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.

        Examples
        --------
        >>> index = ingot.split("model.safetensors", "shards", 128)
        >>> with ingot.open("shards") as file:
        ...     print(file.shard_of("wte"))
        shards/model-00002-of-00002.safetensors
        """
        if options or type(name) is not str:
            checked(safe_open.shard_of, {"name": name, **options})
        return self._checkpoint.shard_of(name) or ""

    def parameter_count(self) -> dict[str, int]:
        """Count the elements of each dtype, over all files. No tensor is read.

        Returns
        -------
        dict of str to int
            The keys are dtype codes, such as ``{"BF16": 7241732096}``, in the order of FORMAT.md's table. The
            elements are counted as stored: a scalar and each element of a buffer count as one, and so does an
            ``I32`` into which a quantised model packs several values. `ingot.inspect` counts the values
            before quantisation.

        Raises
        ------
        HeaderError, CheckpointError, StorageError
            A file that had to be opened cannot be used.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.parameter_count())
        {'F32': 64}
        """
        return self._checkpoint.parameter_count()

    @takes()
    def info(self, name: str, **options: Unpack[NoOptions]) -> TensorInfo:
        """Return a tensor's dtype, shape and offsets without reading its data.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        TensorInfo
            With ``name``, ``dtype`` (a code such as ``"BF16"``), ``shape`` (a tuple), ``begin`` and ``end``
            (bytes, counted from the start of the data section), ``nbytes``, and ``parameter_count`` (the
            elements).

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     info = file.info("wte")
        >>> info.dtype, info.shape, info.nbytes
        ('F32', (8, 4), 128)
        """
        if options or type(name) is not str:
            checked(safe_open.info, {"name": name, **options})
        return self._checkpoint.info(name)

    @takes()
    def get_tensor(self, name: str, **options: Unpack[NoOptions]) -> Value:
        """Read one tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        array or tensor of the framework
            On the CPU with ``"mmap"`` a view of the mapped file that is read when it is first touched, else a
            copy. It may be written to, and it outlives the handle. Views of one tensor from one handle
            share their memory, as upstream's torch tensors do: a write to one changes the others,
            and never the file. `get_slice` says which parts are views.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor. The nearest name is in the message.
        DtypeError
            The framework lacks the dtype or cannot hold the shape. The other tensors of the file can be read.
        StorageError
            Reading failed, or the file is shorter now than when it was opened.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     wte = file.get_tensor("wte")
        >>> wte[0].tolist()
        [0.0, 1.0, 2.0, 3.0]
        """
        if options or type(name) is not str:
            checked(safe_open.get_tensor, {"name": name, **options})
        checkpoint, move = self._checkpoint, self._move
        if move is None:
            # Programs read a hundred thousand tensors one by one.
            plain: Value = checkpoint.tensor(name, self._adapter.wrap)
            return plain
        found: Value = tensor(checkpoint, name, self._adapter.wrap, move)
        return found

    @takes()
    def get_tensors(
        self, keys: Keys | None = None, *, drop: Keys | None = None, **options: Unpack[NoOptions]
    ) -> dict[str, Value]:
        """Read several tensors at once, which is faster than one by one.

        Parameters
        ----------
        keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
            Which tensors, as for `load_file`: all by default.

        Returns
        -------
        dict of str to array or tensor
            As `get_tensor` returns them: in the order of an iterable of `keys`, else of the file.

        Raises
        ------
        TensorNotFoundError
            A name or pattern of `keys` or `drop` matches nothing. The message has the nearest name.
        TypeError
            `keys` or `drop` is not a selector.
        DtypeError, StorageError
            As `get_tensor` does, for the first tensor that fails.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     heads = file.get_tensors("lm_head.*")
        >>> {name: head.shape for name, head in heads.items()}
        {'lm_head.weight': (8, 4)}
        """
        given = checked(safe_open.get_tensors, locals())
        wanted, unwanted = given["keys"], given["drop"]
        names: Iterable[str] | None
        # Reading looks up exact names, so they need no check here.
        names = wanted if isinstance(wanted, tuple) and unwanted is None else self._selected(wanted, unwanted)
        try:
            return tensors(self._checkpoint, names, self._adapter.wrap, self._move)
        except TensorNotFoundError:
            # The error of a direct lookup has more hints.
            self._selected(wanted, unwanted)
            raise

    def _selected(self, keys: Selector | None, drop: Selector | None) -> list[str] | None:
        """Return the names of the selected tensors, or None for all."""
        return None if keys is None and drop is None else select(self._checkpoint, keys, drop)

    @takes()
    def prefetch(
        self,
        plan: Mapping[str, slice | None] | None = None,
        *,
        keys: Keys | None = None,
        drop: Keys | None = None,
        device: Device = None,
        threads: int | None = None,
        ahead: int = AHEAD,
        **options: Unpack[NoOptions],
    ) -> PrefetchLoader[Value]:
        """Read tensors, or rows of them, in the background.

        Like the method of this name in safetensors 0.9, but for every framework, device and source.

        Parameters
        ----------
        plan : dict of str to slice or None, optional
            Which tensors: None reads a whole tensor, a slice with step 1 reads rows of its first dimension.
            Nothing else is read. Not with `keys` or `drop`.
        keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
            Which tensors, all whole, as for `load_file`: all of the file by default.
        device : str, int, the framework's device, dict or callable, optional
            Where the tensors are placed, as for `safe_open`. The handle's device by default.
        threads : int, optional
            How many threads read at once, as for ``load_file``.
        ahead : int
            How many bytes may be read ahead of `take`, 256 MiB by default. A larger tensor is read alone. If
            the file is mapped, the bytes are read into the page cache.

        Returns
        -------
        PrefetchLoader
            The loader returns each tensor once, by `PrefetchLoader.take` or as pairs of name and tensor, in
            the order of an iterable of `keys`, else of the file, which is the fastest. It outlives the
            handle. A handle may have several loaders, such as one for each device.

        Raises
        ------
        TypeError
            `plan` is not a dict, or has something other than None or a slice of ints for a tensor; or `keys`
            or `drop` is not a selector.
        TensorNotFoundError
            A name of `plan`, or a name or pattern of `keys` or `drop`, matches nothing.
        SliceError
            A slice of `plan` has another step than 1 or reaches past the rows, or its tensor is a scalar.
        OptionError
            `device`, `threads` or `ahead` is not one of the choices, or `plan` comes with `keys` or `drop`.
        DtypeError, StorageError
            As `get_tensor` does. Raised by the loader when it returns the tensor; the next call returns the
            next tensor.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     for name, tensor in file.prefetch(keys="*.weight"):
        ...         print(name, tensor.shape)
        ...     with file.prefetch({"wte": slice(0, 2), "lm_head.weight": None}) as loader:
        ...         print(loader.take("wte").shape)
        lm_head.weight (8, 4)
        (2, 4)
        """
        given: Any = checked(safe_open.prefetch, locals())
        mover = self._adapter.mover
        move = self._move if device is None else placed(safe_open.prefetch, mover, device)
        rows = planned(self._checkpoint, plan, given["keys"], given["drop"])
        # The loader has its own handle, so that it outlives this one.
        checkpoint = self._checkpoint.share()
        settled(checkpoint, rows, move)
        threads, ahead = given["threads"], given["ahead"]
        return PrefetchLoader(checkpoint, rows, self._adapter.wrap, move, ahead, threads)

    @takes()
    def warm(
        self, keys: Keys | None = None, *, drop: Keys | None = None, **options: Unpack[NoOptions]
    ) -> int:
        """Bring tensors into the system's page cache, as `ingot.warm` does for a whole file.

        Parameters
        ----------
        keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
            Which tensors, as for `load_file`: all by default.

        Returns
        -------
        int
            The number of bytes of the tensors.

        Raises
        ------
        TensorNotFoundError
            A name or pattern of `keys` or `drop` matches nothing. The message has the nearest name.
        TypeError
            `keys` or `drop` is not a selector.
        StorageError
            Reading failed.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.warm("wte"))
        128
        """
        given = checked(safe_open.warm, locals())
        return self._checkpoint.warm(self._selected(given["keys"], given["drop"]))

    @takes()
    def get_slice(self, name: str, **options: Unpack[NoOptions]) -> TensorSlice[Value]:
        """Prepare to read a part of a tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        TensorSlice
            Index it like the tensor: ``file.get_slice("wte")[:10, ::2]``. It outlives the handle.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.get_slice("wte")[:2, ::2].tolist())
        [[0.0, 2.0], [4.0, 6.0]]
        """
        if options or type(name) is not str:
            checked(safe_open.get_slice, {"name": name, **options})
        # The slice has its own handle, so that it outlives this one.
        checkpoint = self._checkpoint.share()
        return TensorSlice(checkpoint, checkpoint.info(name), self._adapter, self._move, self._again)

    @property
    def path(self) -> str:
        """The path of the file or index, or the URL without user, password and query.

        For an object, the object's own name; empty for a buffer.
        """
        path = self._checkpoint.path
        return "" if path is None else path

    @property
    def format(self) -> str:
        """``"safetensors"`` or ``"bintensors"``."""
        return self._checkpoint.format

    @property
    def backend(self) -> str:
        """How the file is read, as a word.

        ``"mmap"``, ``"pread"``, ``"http"``, ``"hf"``, ``"s3"``, ``"gs"`` or ``"az"``; ``"memory"`` for a
        buffer, and ``"object"`` for any other object.
        """
        return "pread" if self._passes_mapping() else self._checkpoint.backend

    def _passes_mapping(self) -> bool:
        """Return whether tensors are read onto a GPU, for which no mapping is used."""
        return isinstance(self._move, Gpu) and self._checkpoint.backend == "mmap"

    @property
    def why(self) -> str:
        """The reason for the choice of the backend, as a sentence.

        If the cache of a URL (`StorageOptions`) was not used, or memory for copies to a GPU could not be
        pinned, which makes them slower, the sentence also says why.
        """
        why = self._checkpoint.why
        uncached = why_uncached() if "://" in (self._checkpoint.path or "") else None
        if uncached is not None:
            why = f"{why}; the cache is not used: {uncached}"
        if self._passes_mapping():
            why = "tensors are read onto a GPU in parallel, without a mapping"
        unpinned = why_pageable()
        if unpinned is None or self._move is None:
            return why
        return f"{why}; the memory for copies to the GPU is not pinned: {unpinned}"

    def close(self) -> None:
        """Close the file. May be called more than once.

        Slices and mapped tensors remain usable.

        Examples
        --------
        >>> file = ingot.open("model.safetensors")
        >>> wte = file["wte"]
        >>> file.close()
        >>> wte.shape
        (8, 4)
        """
        self._checkpoint.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._checkpoint)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> Value:
        return self.get_tensor(name)

    @overload
    def get(self, name: str, /) -> Value | None: ...

    @overload
    def get(self, name: str, /, default: Other) -> Value | Other: ...

    @takes()
    def get(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, name: str, /, default: Any = None, **options: Unpack[NoOptions]
    ) -> Any:
        """Read one tensor, or return `default` if there is no tensor of that name.

        Parameters
        ----------
        name : str
            The tensor.
        default : object, optional
            The value to return in its place. None by default.

        Raises
        ------
        DtypeError, StorageError
            As `get_tensor` does.

        Examples
        --------
        >>> with ingot.open("model.safetensors") as file:
        ...     print(file.get("wte").shape, file.get("bias"))
        (8, 4) None
        """
        if len(options) > 0:
            checked(safe_open.get, {"name": name, **options})
        # As in a dict, a key that is not a name is missing, without an error.
        return self.get_tensor(name) if name in self else default

    # The methods of `Mapping` would compare all tensors, and make handles unhashable.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names with which IPython completes ``file["``."""
        return self.keys()

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a folded tree of the tensors. Reads no tensor and opens no shard."""
        # Imported here because only notebooks need it.
        from ingot._base.html import page, tree

        facts = [self.format, self.backend]
        if self._checkpoint.closed:
            return page(self.path, [*facts, "closed"])
        facts.append(plural(len(self), "tensor"))
        if self._checkpoint.is_sharded:
            names = in_natural_order(self.keys())
            facts.append(plural(len(self.shards), "file"))
            return page(self.path, facts, tree((name, (basename(self.shard_of(name)),)) for name in names))
        infos = self._checkpoint.infos(natural=True)
        facts.append(nbytes(sum(info.nbytes for info in infos)))
        rows = ((info.name, (info.dtype, list(info.shape), nbytes(info.nbytes))) for info in infos)
        return page(self.path, facts, tree(rows))

    def __repr__(self) -> str:
        state = "closed" if self._checkpoint.closed else f"{len(self)} tensors"
        return f"<ingot.safe_open {_escaped(self.path)}: {self.format}, {self.backend}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return known(self._again())

    def _again(self) -> Again | None:
        """Return a function that opens the handle again, and its arguments. None if there is none."""
        provider = (self._storage_options or {}).get("credentials")
        if provider is not None:
            _check_pickles(self.path, provider)
        # The pickle contains all options of a URL, including tokens and keys.
        arguments = (again_by(self._given, self.path), *self._arguments)
        if type(self) is safe_open:
            return restored, ("safe_open._reopen", arguments)
        return type(self)._reopen, arguments

    @property
    def _storage_options(self) -> StorageOptions | None:
        return self._arguments[2].get("storage_options")

    @property
    def _origin(self) -> tuple[str | None, StorageOptions | None]:
        """The path or URL, None for an object, and the storage options that the handle was opened with."""
        place = again_by(self._given, self.path)
        return fsdecode(place) if is_path(place) else None, self._storage_options

    @classmethod
    def _reopen(cls, path: Source, framework: Framework, device: Any, options: OpenOptions) -> Self:
        file = object.__new__(cls)
        safe_open.__init__(file, path, framework, device, **options)
        return file

    def _check_open(self) -> None:
        if self._checkpoint.closed:
            raise ClosedError(f"{_escaped(self.path)}: file is closed", code="closed", path=self.path)


@overload
def open(
    source: Source,
    framework: Literal["numpy", "np"] = "numpy",
    device: Device = "cpu",
    **options: Unpack[OpenOptions],
) -> safe_open[numpy.ndarray[Any, numpy.dtype[Any]]]: ...


@overload
def open(
    source: Source,
    framework: Literal["torch", "pt", "pytorch"],
    device: Device = "cpu",
    **options: Unpack[OpenOptions],
) -> safe_open[torch.Tensor]: ...


@overload
def open(
    source: Source, framework: Literal["jax", "flax"], device: Device = "cpu", **options: Unpack[OpenOptions]
) -> safe_open[jax.Array]: ...


@overload
def open(
    source: Source,
    framework: Literal["tensorflow", "tf"],
    device: Device = "cpu",
    **options: Unpack[OpenOptions],
) -> safe_open[tensorflow.Tensor]: ...


@overload
def open(
    source: Source, framework: Literal["mlx"], device: Device = "cpu", **options: Unpack[OpenOptions]
) -> safe_open[mlx.array]: ...


@overload
def open(
    source: Source, framework: Literal["paddle"], device: Device = "cpu", **options: Unpack[OpenOptions]
) -> safe_open[paddle.Tensor]: ...


@overload
def open(
    source: Source, framework: Framework, device: Device = "cpu", **options: Unpack[OpenOptions]
) -> safe_open[Any]: ...


@takes(OpenOptions)
def open(
    source: Source, framework: Framework = "numpy", device: Device = "cpu", **options: Unpack[OpenOptions]
) -> safe_open[Any]:
    """Open a file, or a checkpoint of many files, to read tensors from it one by one.

    Parameters
    ----------
    source : ingot.typing.Source
        A path, a URL, a directory, an index, or an object that holds one file, as `safe_open` documents.
    framework : str
        The framework of the tensors: ``"numpy"`` by default, or as for `safe_open`.
    device : str, int, the framework's device, dict or callable
        Where the tensors are placed, as for `safe_open`. ``"cpu"`` by default.
    **options
        How the source is opened: `ingot.typing.OpenOptions`.

    Returns
    -------
    safe_open
        A mapping from name to tensor, and a context manager.

    Raises
    ------
    OSError, HeaderError, CheckpointError, OptionError, ImportError
        As `safe_open` does.
    TypeError
        `source` cannot be read from, or an option is unknown.

    Examples
    --------
    >>> with ingot.open("model.safetensors") as file:
    ...     print(file["wte"].shape, file.get_slice("wte")[:2].shape)
    (8, 4) (2, 4)
    """
    given: Any = checked(open, locals())
    placed(open, adapter(framework).mover, device)
    return safe_open(given.pop("source"), **given)


@takes()
def warm(
    source: Path, *, keys: Keys | None = None, drop: Keys | None = None, **options: Unpack[NoOptions]
) -> int:
    """Bring a file's tensors into the system's page cache, so that later readers do not wait for the disk.

    The file is read in parallel. The call uses no memory for the bytes, and returns when all of them are
    cached.

    Parameters
    ----------
    source : str, bytes or os.PathLike
        A `.safetensors` or a `.bt` file, or a sharded checkpoint. URLs and objects are rejected, since the
        page cache contains only files of this machine.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors, as for `load_file`: all by default.

    Returns
    -------
    int
        The number of bytes of the tensors.

    Raises
    ------
    OSError
        The file cannot be opened.
    TensorNotFoundError
        A name or pattern of `keys` or `drop` matches nothing. The message has the nearest name.
    TypeError
        `keys` or `drop` is not a selector.
    HeaderError, StorageError
        As `ingot.safe_open` does, and if reading fails.

    Examples
    --------
    >>> ingot.warm("model.safetensors", keys="wte")
    128
    """
    chosen = checked(warm, locals())
    wanted, unwanted = chosen["keys"], chosen["drop"]
    checkpoint = Checkpoint.open(chosen["source"], "pread")
    try:
        is_all = wanted is None and unwanted is None
        return checkpoint.warm(None if is_all else select(checkpoint, wanted, unwanted))
    finally:
        checkpoint.close()
