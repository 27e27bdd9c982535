"""A file of tensors, or a checkpoint of many, open for reading."""

from __future__ import annotations

from ._frameworks import adapter
from ._load import indexed, moved, tensors
from ._native import Checkpoint, is_url
from ._options import checked_ahead, one_of
from ._text import _escaped, _quoted
from .errors import ClosedError, OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, Literal, Self

    from ._frameworks import Adapter
    from ._load import Move
    from ._native import TensorInfo, Wrap
    from ._objects import Source
    from .typing import Path, StorageOptions

    # A function that opens a handle, and what it is called with.
    Again = tuple[Callable[..., "safe_open"], tuple[Any, ...]]

    Order = Literal["file", "name"] | Iterable[str]

# Bytes that are read ahead by default: several of the largest tensors that are common, little beside a model.
AHEAD = 256 << 20


BACKENDS = ("auto", "mmap", "pread")


class safe_open:
    """Open a file, or a checkpoint of many files, and read tensors from it one by one.

    Parameters
    ----------
    filename : str, bytes, os.PathLike, or an object to read from
        A `.safetensors` or a `.bt` file; the content decides which, not the name. Or the index of a sharded
        checkpoint (``model.safetensors.index.json``): its shards become one handle. Or a directory: with
        ``model.safetensors.index.json`` in it, else one other ``*.safetensors.index.json``, else
        ``model.safetensors``, else one other file of tensors. A str that begins with ``http://``,
        ``https://``, ``hf://``, ``s3://``, ``gs://`` or ``az://`` is the URL of a file: the header is fetched
        at once, and of the tensors what is asked for. ``file://`` is the path of one. Or the
        URL of an index, whose shards lie beside it.
        ``hf://owner/repo`` is the repository's ``model.safetensors``, else its
        ``model.safetensors.index.json``. Or an object that holds one file: a buffer (but `bytes` are a path);
        a file that is open for reading bytes, with ``read``, ``seek`` and ``tell``, such as a member of a
        zip; a file of fsspec, ``fsspec.open("gcs://bucket/model.safetensors")``; or `ingot.Ranges`, a file in
        any store. The notes say how these are read.
    framework : str
        What the tensors shall be: ``"numpy"`` or ``"np"``; ``"torch"``, ``"pt"`` or ``"pytorch"``; ``"jax"``
        or ``"flax"``; ``"tensorflow"`` or ``"tf"``; ``"mlx"``; ``"paddle"``.
    device : str, int or the framework's device
        Where the tensors shall be. On ``"cpu"``, the default, they are views of the file where the backend
        maps it; for any other device they are copied there. NumPy knows only ``"cpu"``.
    backend : {"auto", "mmap", "pread"}
        How the file is read. ``"mmap"`` maps it, copy on write: tensors can be written to, the file never
        changes. ``"pread"`` reads into memory that ingot owns, past the page cache what is not in it.
        ``"auto"`` takes what suits the file: a mapping where it is on a local disk, whose pages all processes
        share and the next one finds in the page cache; reading where it comes over a network or through FUSE.
        ``INGOT_BACKEND`` in the environment decides where this is ``"auto"``; `backend` and `why` of the
        handle say what was chosen.
    strict : bool
        Also refuse what is harmless but not as a writer should write it (FORMAT.md, "Leniency").
    max_header_size : int, optional
        Refuse longer headers, in bytes. 100,000,000 by default, as upstream; 25,000,000 for URLs.
    confine : bool
        Refuse symbolic links below the directory that `filename` is or lies in, and files with a second name
        (hard links). By default links are followed, because the cache of the Hub is made of them. An index
        that names files outside of its directory is always refused. Nothing for URLs.
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
        The index breaks a rule (FORMAT.md, I1 to I8), the shards do not hold what it says, or the directory
        holds several checkpoints.
    OptionError
        `framework`, `device`, `backend` or ``INGOT_BACKEND`` is not one of the choices, or the scheme of a
        URL is none of these.
    ImportError
        The framework is not installed. The message has the command that installs it.

    Notes
    -----
    It works as a context manager and without ``with``. It is a mapping from name to tensor: ``len(file)``,
    ``name in file``, ``for name in file``, ``file[name]``, ``file.items()``.

    After `close` every method raises `ClosedError`; tensors and slices that were taken before remain good. A
    handle can be used from many threads at once, and pickled, as its slices can: it is then opened again, by
    its path, where it arrives, such as in the workers of a ``DataLoader``.

    Opening a sharded checkpoint reads its index, finds all its shards and opens the first. Each other one
    is opened when it is first needed, and every one is held against the index when it is: a shard that
    lacks a tensor which the index says it holds, or has one that it does not, is refused
    (`CheckpointError`), and so is one that was exchanged since (`StorageError`). What looks into all
    shards, such as `get_tensors`, `offset_keys`, `parameter_count` and every `load_file`, holds all of them
    against it; `keys` gives what the index says. Where ``total_size`` in the index is not the size of the
    tensors, whatever reads all of them warns (`UserWarning`).

    A checkpoint of thousands of shards takes few descriptors: those that were not read for the longest are
    closed when more than 48 are open, and opened again when they are read. `StorageError` where another file
    has the name by then, or it was written to. A checkpoint of one file keeps it open.

    Of an object what is asked for is what a URL would be asked for: the header, then the bytes that are
    wanted, several ranges at a time where the object stands for a store. The handle holds the object and
    never closes it. An open file is read by one range at a time, which moves its position: let nothing else
    use it meanwhile. A buffer cannot be resized as long as the handle is there; a `io.BytesIO` can. What an
    object raises is the cause of a `StorageError` that names the object, and an answer that is too short or
    too long is one too. A store is asked after each reading whether the file is still the one that was
    opened, as far as it tells versions apart; of an open file only its end is noticed. Pickling a handle
    pickles the object with it. In a child after a fork, what was opened before raises `ClosedError`
    (``"forked"``), memory excepted: open it again there.

    Opening an index behind a URL fetches it and nothing else; `format` is then what the names of its shards
    say. A shard that is missing raises `FileNotFoundError` when it is first needed, with its URL. On the Hub
    all shards are of the commit that the index was of.
    """

    __module__ = "ingot"

    __slots__ = ("__weakref__", "_adapter", "_arguments", "_checkpoint", "_given", "_move")

    def __init__(
        self,
        filename: Source,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "auto",
        strict: bool = False,
        max_header_size: int | None = None,
        confine: bool = False,
        storage_options: StorageOptions | None = None,
    ) -> None:
        self._adapter = adapter(framework)
        self._move = self._adapter.mover(device)
        self._checkpoint = open_checkpoint(
            filename, backend, strict, max_header_size, confine, storage_options
        )
        self._given = filename
        self._arguments = (framework, device, backend, strict, max_header_size, confine, storage_options)

    def keys(self) -> list[str]:
        """Give the names of all tensors, sorted."""
        return self._checkpoint.names()

    def offset_keys(self) -> list[str]:
        """Give the names of all tensors in the order of their data, file after file."""
        return self._checkpoint.offset_names()

    def metadata(self) -> dict[str, str] | None:
        """Give the text that is stored beside the tensors.

        Returns
        -------
        dict of str to str, or None
            A fresh dict that the caller may change; None where the file has none. For a sharded checkpoint
            that of the index, whose values may be any JSON, such as the int ``total_size``;
            `shard_metadata` has that of the files.
        """
        return self._checkpoint.metadata()

    def shard_metadata(self) -> dict[str, dict[str, str] | None]:
        """Give the metadata of each file.

        Returns
        -------
        dict of str to dict or None
            By the name that the index has for the file. A single file has its own name.

        Raises
        ------
        HeaderError, CheckpointError, StorageError
            A file that had to be opened cannot be used.
        """
        return self._checkpoint.shard_metadata()

    @property
    def shards(self) -> list[str]:
        """The paths of the files, in the order of their names: one, where there is no index."""
        return self._checkpoint.shards

    def shard_of(self, name: str) -> str:
        """Give the path of the file that holds a tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        """
        return self._checkpoint.shard_of(name) or ""

    def parameter_count(self) -> dict[str, int]:
        """Count the elements of each dtype, over all files. No tensor is read.

        Returns
        -------
        dict of str to int
            By the dtype's code, such as ``{"BF16": 7241732096}``. Elements as they are stored: a scalar
            is one, buffers count, and what a quantised model packs into an ``I32`` is one; `ingot.metadata`
            counts what it was before. In the order of FORMAT.md's table.

        Raises
        ------
        HeaderError, CheckpointError, StorageError
            A file that had to be opened cannot be used.
        """
        return self._checkpoint.parameter_count()

    def info(self, name: str) -> TensorInfo:
        """Say what a tensor is without reading it.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        TensorInfo
            With ``name``, ``dtype`` (a code such as ``"BF16"``), ``shape`` (a tuple), ``begin`` and ``end``
            (bytes, counted from the start of the data section) and ``nbytes``.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        """
        return self._checkpoint.info(name)

    def get_tensor(self, name: str) -> Any:
        """Read one tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        array or tensor of the framework
            On the CPU with ``"mmap"`` a view of the mapped file that is read when it is first touched, else a
            copy. It may be written to, and it outlives the handle. Views that one handle gives of one tensor
            share their memory, as upstream's torch tensors do: what is written to one is seen by the others,
            and never by the file. `get_slice` says which parts are views.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor. The nearest name is in the message.
        DtypeError
            The framework lacks the dtype or cannot hold the shape. The other tensors of the file can be read.
        StorageError
            Reading failed, or the file is shorter now than when it was opened.
        """
        checkpoint = self._checkpoint
        return moved(checkpoint, name, checkpoint.tensor(name, self._adapter.wrap), self._move)

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Read several tensors at once, which is faster than one by one.

        Parameters
        ----------
        names : iterable of str, optional
            The tensors, all of them by default.

        Returns
        -------
        dict of str to array or tensor
            As `get_tensor` gives them, in the order of `names`, else in that of the file.

        Raises
        ------
        TensorNotFoundError, DtypeError, StorageError
            As `get_tensor` does, for the first tensor that fails.
        """
        return tensors(self._checkpoint, names, self._adapter.wrap, self._move)

    def iter_tensors(self, order: Order = "file", *, ahead: int = 256 << 20) -> TensorIterator:
        """Read the tensors one after the other, in the background, ahead of whoever takes them.

        Parameters
        ----------
        order : {"file", "name"} or iterable of str
            In which order they come: that of their data, which is the fastest; that of their names; or these
            tensors only, in this order.
        ahead : int
            How many bytes may be read and not yet taken, 256 MiB by default. A tensor that is larger is read
            when nothing else waits. Where the file is mapped they are bytes of the page cache.

        Returns
        -------
        TensorIterator
            Of pairs of name and tensor, as `get_tensor` gives them. It outlives the handle. Closing or
            dropping it frees what was not taken and ends the thread that reads.

        Raises
        ------
        TensorNotFoundError
            `order` names a tensor that there is not.
        OptionError
            `order` or `ahead` is not one of the choices.
        DtypeError, StorageError
            As `get_tensor` does, from the iterator, when the tensor's turn comes. The next call goes on with
            the next tensor.
        """
        # A handle of its own, so that it outlives this one.
        checkpoint = self._checkpoint.share()
        names = in_order(checkpoint, order)
        return TensorIterator(checkpoint, names, self._adapter.wrap, self._move, checked_ahead(ahead))

    def warm(self, names: Iterable[str] | None = None) -> int:
        """Bring tensors into the system's page cache, as `ingot.warm` does for a whole file.

        Parameters
        ----------
        names : iterable of str, optional
            The tensors, all of them by default.

        Returns
        -------
        int
            Their bytes.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        StorageError
            Reading failed.
        """
        return self._checkpoint.warm(names)

    def get_slice(self, name: str) -> TensorSlice:
        """Prepare to read a part of a tensor.

        Parameters
        ----------
        name : str
            The tensor.

        Returns
        -------
        TensorSlice
            Index it as you would the tensor: ``file.get_slice("wte")[:10, ::2]``. It outlives the handle.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        """
        # A handle of its own, so that it outlives this one.
        checkpoint = self._checkpoint.share()
        return TensorSlice(checkpoint, checkpoint.info(name), self._adapter, self._move, self._again)

    @property
    def path(self) -> str:
        """The file, as it was given, as a str; or the index; or the URL without user, password and query.

        What an object calls itself; empty for a buffer.
        """
        path = self._checkpoint.path
        return "" if path is None else path

    @property
    def format(self) -> str:
        """``"safetensors"`` or ``"bintensors"``."""
        return self._checkpoint.format

    @property
    def backend(self) -> str:
        """How it is read: ``"mmap"``, ``"pread"``, ``"http"``, ``"hf"``, ``"s3"``, ``"gs"`` or ``"az"``.

        ``"memory"`` for a buffer, ``"object"`` for what else there is to read from.
        """
        return self._checkpoint.backend

    @property
    def why(self) -> str:
        """Why that backend was chosen, as a sentence."""
        return self._checkpoint.why

    def close(self) -> None:
        """Close the file. Again is allowed.

        Slices and mapped tensors keep what they need of it.
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

    def __getitem__(self, name: str) -> Any:
        return self.get_tensor(name)

    def values(self) -> Iterator[Any]:
        """Read the tensors one by one, in the order of `keys`."""
        return (self.get_tensor(name) for name in self.keys())

    def items(self) -> Iterator[tuple[str, Any]]:
        """Read the tensors one by one with their names, in the order of `keys`."""
        return ((name, self.get_tensor(name)) for name in self.keys())

    def __repr__(self) -> str:
        state = "closed" if self._checkpoint.closed else f"{len(self)} tensors"
        return f"<ingot.safe_open {_escaped(self.path)}: {self.format}, {self.backend}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return _known(self._again())

    def _again(self) -> Again | None:
        """What opens it again, wherever that is; None where nothing does."""
        # Of a URL with all that opens it: tokens and keys go along.
        return type(self)._reopen, (again_by(self._given, self.path), *self._arguments)

    # By methods of the class, so that a pickle names nothing but `ingot.safe_open`.

    @classmethod
    def _reopen(
        cls,
        path: Source,
        framework: str,
        device: Any,
        backend: str,
        strict: bool,
        max_header_size: int | None,
        confine: bool,
        storage_options: StorageOptions | None = None,
    ) -> Self:
        file = object.__new__(cls)
        safe_open.__init__(
            file,
            path,
            framework,
            device,
            backend=backend,
            strict=strict,
            max_header_size=max_header_size,
            confine=confine,
            storage_options=storage_options,
        )
        return file

    @classmethod
    def _slice_again(
        cls, opens: Callable[..., safe_open], arguments: tuple[Any, ...], name: str
    ) -> TensorSlice:
        return opens(*arguments).get_slice(name)

    def _check_open(self) -> None:
        if self._checkpoint.closed:
            raise ClosedError(f"{_escaped(self.path)}: file is closed", code="closed", path=self.path)


class TensorSlice:
    """A tensor of an open file, to be read in part. `safe_open.get_slice` makes them.

    It can be pickled as its handle can, also when that was closed: the file is opened again where it arrives.
    """

    __slots__ = ("_adapter", "_again", "_checkpoint", "_info", "_move")

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: TensorInfo,
        adapter: Adapter,
        move: Move | None,
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

    def __getitem__(self, index: Any) -> Any:
        """Read the part of the tensor that `index` selects.

        Parameters
        ----------
        index : int, slice, None, ``...``, list of int, or a tuple of these
            By the rules of NumPy's basic indexing, and one list of positions. Only the selected bytes are
            read. Whatever else the framework can index by (masks, arrays, several lists) is left to it: the
            whole tensor is read, or mapped, and indexed.

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
        name, wrap = self._info.name, self._adapter.wrap
        try:
            part = self._checkpoint.select(name, index, wrap)
        except NotImplementedError:
            part = indexed(
                self._checkpoint, name, self._checkpoint.tensor(name, wrap), index, self._adapter.at
            )
        return moved(self._checkpoint, name, part, self._move)

    def __reduce__(self) -> tuple[Any, ...]:
        return safe_open._slice_again, (*_known(self._again()), self._info.name)

    def __repr__(self) -> str:
        return f"<slice of tensor {_quoted(self._info.name)}: {self._info.dtype} {self.get_shape()}>"


def _known(again: Again | None) -> Again:
    if again is None:
        raise TypeError("cannot pickle a handle that was made from an open file: make it with its path")
    return again


def again_by(filename: Any, path: str) -> Any:
    """What opens the same again: a URL with its secrets, an object, and else `path`."""
    # What is shown of a URL does not open it again.
    is_shown = isinstance(filename, str) and is_url(filename)
    return filename if is_shown or not is_path(filename) else path


def is_path(given: object) -> bool:
    """Whether it is a path. The files of fsspec may have one as well, and may be elsewhere."""
    return isinstance(given, (str, bytes)) or (hasattr(given, "__fspath__") and not hasattr(given, "fs"))


def open_checkpoint(
    filename: Source,
    backend: str,
    strict: bool = False,
    max_header_size: int | None = None,
    confine: bool = False,
    storage_options: StorageOptions | None = None,
    *,
    lent: bool = False,
) -> Checkpoint:
    """The open file, the open checkpoint, or what is behind a URL or in an object.

    A file that is `lent` is one of perhaps many, which is closed while nobody reads it and others are read.
    """
    one_of("backend", backend, BACKENDS)
    if isinstance(filename, str) and is_url(filename):
        if backend == "mmap":
            raise OptionError("backend 'mmap' is for files: what is behind a URL cannot be mapped")
        return Checkpoint.open_url(filename, storage_options, strict, max_header_size)
    path: Any = filename
    if not is_path(filename):
        # Imported here: it takes the modules of threads.
        from ._objects import open_object

        path = open_object(filename, backend, strict, max_header_size)
        if isinstance(path, Checkpoint):
            return path
    return Checkpoint.open(path, backend, strict, max_header_size, confine, lent)


class TensorIterator:
    """Pairs of name and tensor, read ahead of whoever takes them. `safe_open.iter_tensors` makes them.

    It ends its thread and frees what was not taken when it is closed, when it is dropped, and at the end of a
    ``with``. An exception about one tensor does not end it: the next call gives the next tensor.
    """

    __slots__ = ("__weakref__", "_checkpoint", "_move", "_stream", "_wrap")

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        wrap: Wrap,
        move: Callable[[Any], Any] | None,
        ahead: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._wrap = wrap
        self._move = move
        self._stream = checkpoint.stream([(name, None) for name in names], ahead)
        if checkpoint.backend == "object":
            from ._objects import close_at_exit

            close_at_exit(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Any]:
        found = self._stream.next(self._wrap)
        if found is None:
            raise StopIteration
        name, tensor = found
        return name, moved(self._checkpoint, name, tensor, self._move)

    def close(self) -> None:
        """Stop reading, and let go of what was not taken. Again is allowed."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def in_order(checkpoint: Checkpoint, order: Order) -> list[str]:
    """The names that `order` stands for."""
    if not isinstance(order, str):
        return list(order)
    if order == "file":
        return checkpoint.offset_names()
    if order == "name":
        return checkpoint.names()
    raise OptionError(
        f"order {order!r} is unknown: expected 'file', 'name' or an iterable of names",
        code="unknown-order",
        expected=("file", "name"),
        found=order,
    )


def warm(filename: Path) -> int:
    """Bring a file's tensors into the system's page cache, so that what reads them next need not wait.

    It reads in parallel, keeps nothing in memory of its own, and returns when all is there.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        A `.safetensors` or a `.bt` file.

    Returns
    -------
    int
        The bytes of the tensors.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError, StorageError
        As `ingot.safe_open` does, and where reading fails.
    """
    checkpoint = open_checkpoint(filename, "pread")
    try:
        return checkpoint.warm()
    finally:
        checkpoint.close()
