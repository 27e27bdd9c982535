"""Files that are written tensor by tensor."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from os.path import exists
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack
from warnings import warn
from weakref import WeakSet

from ingot import _native
from ingot._base.checks import format_for, is_durable, named, stored
from ingot._base.frameworks import payload
from ingot._base.options import Saving, checked, takes
from ingot._base.text import _escaped, _quoted, located
from ingot.errors import OptionError, SaveError
from ingot.typing import Format, NoOptions, Path, ReplaceOptions, Spec, StorageOptions

from .save import Views, rendered

if TYPE_CHECKING:
    from .store_writer import StoreWriter

_ALL = ...
Index = Any
# The writers of this process, which a fork of it disowns.
_WRITERS: WeakSet[Writer] = WeakSet()


@takes(ReplaceOptions)
class Writer:
    """Write a file that need not fit in memory: tensor by tensor, slice by slice, by threads and processes.

    Parameters
    ----------
    destination : str, bytes or os.PathLike
        The path of the file, or a URL of ``s3://`` or ``az://``. An existing file stays until `commit`.
    specs : dict of str to (dtype, shape), optional
        All tensors of the file. The dtype is one of `ingot.typing.Dtype`, such as ``"BF16"``. Any object with
        ``dtype`` and ``shape`` may take the place of the pair: a tensor on the meta device, an array, the
        `TensorInfo` of another file. Where they are not known, pass ``write_options={"reserve_header": n}``
        instead: room of `n` bytes for the header, about 100 and the name for each tensor. Tensors are then
        appended whole, in the order of the calls, and `join` is not possible.
    metadata : dict of str to str, optional
        Text to store beside the tensors, as for `save_file`.
    format : {"safetensors", "bintensors"}, optional
        What to write. By default ``.bt`` at the end of the path means bintensors. Without `specs` the file
        is safetensors: a bintensors header has no room for more tensors.
    aliases : dict of str to str, optional
        Aliases of tensors in `specs`, each with the name of its tensor, which is stored once. They are
        recorded as by ``save_file(..., shared="alias")`` of `ingot.torch`. Only with `specs`.
    storage_options : dict, optional
        How a store is reached (`ingot.StorageOptions`).
    **options
        How the file is written: `ingot.typing.SaveOptions`. `commit` flushes. The key `align` of
        `write_options` needs `specs`.

    Raises
    ------
    FileExistsError
        The file exists and `overwrite` is False. `commit` raises it for a file that was created in the
        meantime.
    OSError
        The directory cannot be written to.
    StorageError
        There is no space, or another writer fills the same file (``code`` is ``"busy"``).
    TypeError, SaveError, OptionError
        The specs are invalid, or no file can hold such tensors.

    Warns
    -----
    RuntimeWarning
        The writer is left without `commit` or `close`.

    Notes
    -----
    Only `commit` writes the file. If the ``with`` block ends without it, or the writer is deleted, the new
    file is removed, an existing file stays, and a `RuntimeWarning` names the path. An exception in the block
    and `close` discard the file without a warning. After a process that was killed, the next save to this
    destination cleans up. The file is the one that `save_file` of the same tensors writes, byte for byte,
    except without `specs`.

    A writer locks its own new file. It does not take the lock on the directory that `save_sharded` holds
    during a save: one rename replaces one file, so readers find the old file or the new one, and a save to
    the same directory does not wait for a writer that fills its file for hours. A second writer for the same
    path raises.

    Several processes on one machine can fill a file: one creates the writer, the others `join`. Each element
    must be written exactly once, by any process; no division of the work is needed in advance, since a second
    write of an element is rejected. One process commits when all have written, and the creator stays until
    then: if it is killed, the others cannot write or commit any more, unless one of them takes over (`join`).
    After a fork, the child has to join.

    Every separate range takes some 50 bytes beside the file until the commit, so writing the columns of a
    large matrix one by one costs more than writing its rows.

    To a **store**, the parts of the file are sent while it is written. So tensors are written whole or in
    consecutive rows, in the order of the file: by the size of their dtype, the largest first, and then by
    name. `write` copies the values, and up to 256 MiB may be written before their turn. `specs` are needed,
    and other processes cannot `join`.

    Examples
    --------
    >>> with ingot.Writer("out.safetensors", {"wte": ("F32", [8, 4])}) as writer:
    ...     for first in range(0, 8, 2):
    ...         rows = numpy.full((2, 4), first, "float32")
    ...         writer.write("wte", rows, index=slice(first, first + 2))
    ...     writer.commit()
    >>> ingot.numpy.load_file("out.safetensors")["wte"][:, 0].tolist()
    [0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    """

    __slots__ = ("__weakref__", "_is_begun", "_path", "_writer")

    def __init__(
        self,
        destination: Path,
        specs: Mapping[str, Spec] | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        format: Format | None = None,
        aliases: Mapping[str, str] | None = None,
        storage_options: StorageOptions | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> None:
        self._is_begun = False
        given = checked(Writer, locals(), destination=_native.destination)
        how = Saving.among(Writer, given)
        path = given["destination"]
        self._path = _native.shown_url(path) if isinstance(path, str) else path
        self._writer: _native.Writer | _native.Appender | StoreWriter
        if isinstance(path, str) and _native.is_url(path):
            self._writer = _to_store(path, specs, aliases or {}, how)
        elif specs is None:
            _check_appending(how, aliases)
            self._writer = _native.Appender.create(
                self._path, how.reserve_header, how.metadata, **how.of_named_file()
            )
        else:
            declared = [_declared(*item) for item in named(specs, value="(dtype, shape)").items()]
            views, kind = rendered(_views(specs, aliases or {})), format_for(self._path, format)
            new = {"records": views, **how.of_new_file()}
            self._writer = _native.Writer.create(self._path, declared, how.metadata, kind, **new)
        self._is_begun = True
        _WRITERS.add(self)

    @classmethod
    @takes()
    def join(
        cls,
        destination: Path,
        *,
        orphaned: Literal["refuse", "finish"] = "refuse",
        durable: bool | None = None,
        **options: Unpack[NoOptions],
    ) -> Self:
        """Take part in filling a file that a writer in another process, or in this one, began.

        Parameters
        ----------
        destination : str, bytes or os.PathLike
            The path that was passed to the creator, or another path to the same file.
        orphaned : {"refuse", "finish"}
            What to do if the process that created the writer was killed before a commit. By default the file
            cannot be joined: its contents may belong to an earlier run, with other values. With ``"finish"``
            this writer takes over, and the elements written so far count. The caller must know that they
            belong together. If several processes do so, one takes over and the others join it. Elements that
            were being written at the time of the kill must be written again.
        durable : bool, optional
            As for `Writer`, for a commit by this writer.

        Returns
        -------
        Writer
            Leaving the block without a commit removes nothing, unless this writer is the creator or took
            over.

        Raises
        ------
        StorageError
            No writer fills this file (``code`` is ``"nothing-to-join"``); its creator was killed
            (``"orphaned"``) and, with ``"finish"``, others who joined it have not left yet; or the journal
            beside the file is damaged (``"broken-journal"``), or cannot be read or locked (``"write"``).
        OptionError
            `orphaned` is not one of the choices.

        Notes
        -----
        A lock shows whether the creator still runs. On a file system without locks a file cannot be joined.

        Examples
        --------
        >>> with ingot.Writer("out.safetensors", {"wte": ("F32", [8, 4])}) as writer:
        ...     # In another process of the same machine:
        ...     with ingot.Writer.join("out.safetensors") as other:
        ...         other.write("wte", numpy.ones((4, 4), "float32"), index=slice(4, 8))
        ...     writer.write("wte", numpy.zeros((4, 4), "float32"), index=slice(0, 4))
        ...     writer.commit()
        """
        given = checked(Writer.join, locals())
        writer = object.__new__(cls)
        writer._path, writer._is_begun = given["destination"], False
        finish, flush = orphaned == "finish", is_durable(given["durable"])
        writer._writer = _native.Writer.join(writer._path, finish=finish, durable=flush)
        _WRITERS.add(writer)
        return writer

    @takes()
    def write(self, name: str, tensor: Any, index: Index = _ALL, **options: Unpack[NoOptions]) -> None:
        """Write a tensor, or a part of one.

        Parameters
        ----------
        name : str
            One of the specs; without them any name that is not there yet.
        tensor : array or tensor of any framework
            The values. They are neither kept nor changed, and must not change during the write.
        index : int, slice, None, ``...``, list of int, or a tuple of these
            Which elements of the tensor these are, by the rules of NumPy's basic indexing: `tensor`
            has the shape of ``whole[index]``. All by default. A writer without specs appends whole tensors.

        Raises
        ------
        TensorNotFoundError
            No spec has this name.
        SliceError
            The index does not fit the spec.
        SaveError
            Dtype or shape differ from the spec (``code`` is ``"mismatch"``); elements were written before, or
            are being written by another writer (``"filled-twice"``); or there is no space left in the header
            (``"reserve-full"``); or too much was written to a store before its turn (``"out-of-order"``).
        ClosedError
            The file was committed, or this writer was closed.
        OSError
            The store has refused an earlier part of the file.
        StorageError
            Writing failed, the creator left (``"abandoned"``) or was killed (``"orphaned"``), or the journal
            beside the file is damaged (``"broken-journal"``).

        Notes
        -----
        If the call fails, none of the elements count as written.

        Examples
        --------
        >>> specs = {f"layers.{layer}.weight": ("F32", (8, 4)) for layer in range(2)}
        >>> with ingot.Writer("out.safetensors", specs) as writer:
        ...     for name, (dtype, shape) in specs.items():
        ...         writer.write(name, numpy.zeros(shape, "float32"))
        ...     writer.commit()
        """
        checked(Writer.write, locals())
        if isinstance(self._writer, _native.Appender):
            if index is not _ALL:
                raise OptionError(
                    "write(): index: a writer without specs appends whole tensors", code="appended-in-part"
                )
            self._writer.append(name, tensor, payload)
            return
        try:
            self._writer.write(name, tensor, index, payload)
        except NotImplementedError:
            expected = f"ints, slices, None, ... or one list of ints, found {type(index).__name__}"
            raise TypeError(f"write(): tensor {_quoted(name)}: index must be {expected}") from None

    def commit(self) -> None:
        """Flush the file and rename it to its path.

        Raises
        ------
        FileExistsError
            A file with this name exists, and `overwrite` is False. The written data is removed.
        SaveError
            Elements were not written: none of a tensor's (``code`` is ``"never-filled"``) or only some
            (``"partly-filled"``). The message names the tensor, and writing may continue.
        ClosedError
            The file was committed before.
        FileExistsError
            Another file was made at the destination, and `overwrite` is False. The new file is removed.
        StorageError
            Flushing or renaming failed: the old file is unchanged, the new one is lost. Or as for `write`.

        Examples
        --------
        >>> writer = ingot.Writer("out.safetensors", {"bias": ("F32", [4])})
        >>> writer.write("bias", numpy.ones(4, "float32"))
        >>> writer.commit()
        >>> ingot.open("out.safetensors").keys()
        ['bias']
        """
        self._writer.commit()
        self._is_begun = False

    def close(self) -> None:
        """Discard the file if this writer began it and did not commit it. May be called more than once.

        Examples
        --------
        >>> import os
        >>> writer = ingot.Writer("out.safetensors", {"bias": ("F32", [4])})
        >>> writer.close()
        >>> os.path.exists("out.safetensors")
        False
        """
        self._is_begun = False
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        try:
            if kind is None:
                self._warn_of_loss("the with block ended", 3)
        finally:
            self.close()

    def __del__(self) -> None:
        # The attribute is missing if an argument was wrong.
        if getattr(self, "_is_begun", False):
            self._warn_of_loss("the writer was deleted", 2)
            self.close()

    def _warn_of_loss(self, what: str, stacklevel: int) -> None:
        """Warn that a file that this writer began is lost, unless a writer that joined has committed it."""
        if self._is_begun and _is_pending(self._writer):
            warn(
                f"{_escaped(self._path)}: {what} without commit(): the file is not written — call close() to "
                "give it up",
                RuntimeWarning,
                stacklevel=stacklevel,
            )

    def __repr__(self) -> str:
        return f"<ingot.Writer {_escaped(self._path)}>"

    def __reduce__(self) -> Any:
        way_out = "call ingot.Writer.join in the other process"
        raise TypeError(f"a Writer cannot be pickled, since it fills a file from this process: {way_out}")


def _is_pending(writer: _native.Writer | _native.Appender | StoreWriter) -> bool:
    """Return whether a file that a writer began was neither committed nor discarded."""
    if isinstance(writer, _native.Writer):
        return exists(writer.temporary_path)
    return isinstance(writer, _native.Appender) or writer.is_pending()


def native(writer: Writer) -> _native.Writer:
    """Return the native writer of a `Writer` with `specs`."""
    assert isinstance(writer._writer, _native.Writer)
    return writer._writer


def _disown() -> None:
    for writer in tuple(_WRITERS):
        writer._is_begun = False
        writer._writer.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


@atexit.register
def _end() -> None:
    """End the threads of writers to stores, which would run into the end of the interpreter."""
    for writer in tuple(_WRITERS):
        if not isinstance(writer._writer, _native.Writer | _native.Appender):
            try:
                writer._warn_of_loss("the program ended", 1)
            finally:
                writer.close()


def _to_store(
    url: str, specs: Mapping[str, Spec] | None, aliases: Mapping[str, str], how: Saving
) -> StoreWriter:
    """Return the writer of an object."""
    how.check_url(url)
    if specs is None:
        message = f"Writer(): {_escaped(_native.shown_url(url))}: expected specs of all tensors for a store"
        raise OptionError(message, code="specs-or-reserve")
    # Imported here: few programs write so to a store.
    from . import store_writer

    declared = [_declared(*item) for item in named(specs, value="(dtype, shape)").items()]
    elements = {name: store_writer.Spec(code, tuple(shape)) for name, code, shape in declared}
    return store_writer.StoreWriter(url, elements, rendered(_views(specs, aliases)), how)


def _check_appending(how: Saving, aliases: Mapping[str, str] | None) -> None:
    """Raise `OptionError` for options that a writer without specs cannot keep."""
    if not how.reserve_header:
        message = "Writer(): expected specs, or reserve_header in write_options for tensors that are appended"
        raise OptionError(message, code="specs-or-reserve")
    if how.format not in (None, "safetensors"):
        message = "Writer(): format: without specs the file is safetensors: a bintensors header has no room"
        raise OptionError(message, code="no-room", found=how.format)
    if aliases or how.align != how._field_defaults["align"]:
        option = "aliases" if aliases else "align"
        raise OptionError(f"Writer(): {option} needs specs", code="specs-or-reserve")


def _views(specs: Mapping[str, Any], aliases: Mapping[str, str]) -> Views:
    """Return the record of `aliases`, names outside of `specs` for tensors of `specs`."""
    for name, of in aliases.items():
        if name in specs or of not in specs:
            why = "it has a spec of its own" if name in specs else f"no spec has the name {_quoted(of)}"
            reason = f"{why}: expected another name for a tensor of specs"
            raise located(SaveError, reason, code="invalid-alias", tensor=name, found=of)
    return {name: {"of": of} for name, of in aliases.items()}


def _declared(name: str, spec: Any) -> tuple[str, str, list[int]]:
    """Return the name, the dtype code and the shape in elements."""
    dtype, shape = _pair(name, spec)
    code, of_elements = stored(name, dtype, shape)
    return name, code, list(of_elements)


def _pair(name: str, spec: Any) -> tuple[Any, Sequence[int]]:
    if isinstance(spec, (tuple, list)) and len(spec) == 2:
        dtype, shape = spec
    else:
        dtype, shape = getattr(spec, "dtype", None), getattr(spec, "shape", None)
    if dtype is None or shape is None or isinstance(shape, (str, int)):
        found = type(spec).__name__
        raise TypeError(f"tensor {_quoted(name)}: expected (dtype, shape), or what has both, found {found}")
    for dim in shape:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"tensor {_quoted(name)}: expected a shape of ints, found {shape!r}")
    dims = [int(dim) for dim in shape]
    if not all(0 <= dim < 1 << 64 for dim in dims):
        reason = f"expected a shape of integers from 0 to 2^64 - 1, found {dims}"
        raise located(SaveError, reason, code="invalid-shape", tensor=name, found=dims)
    return dtype, dims
