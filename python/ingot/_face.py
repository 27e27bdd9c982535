"""`load`, `load_file`, `save` and `save_file` for frameworks that differ in their tensors only."""

from __future__ import annotations

from typing import Generic, TypeVar, overload

from . import _load, _native, _open
from ._load import Selected, chosen, reading
from ._options import known_format, named, texts
from ._save import write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future
    from typing import Any, Literal

    from typing_extensions import Buffer, Unpack

    from ._native import TensorInfo
    from ._objects import Source
    from ._save import Payload
    from .typing import Align, Checksums, Format, LoadOptions, Path, Progress, SaveOptions, StorageOptions

Tensor = TypeVar("Tensor")


class Whole(Generic[Tensor]):
    """Whole files of one framework's tensors. Its methods are the functions of that framework's module.

    Parameters
    ----------
    wrap : Wrap
        How bytes become tensors.
    mover : callable
        Gives, for a device, what takes a tensor there; None where it may stay.
    at : callable
        Indexes a tensor by the framework's own rules.
    payload : callable
        Gives, for a name and a tensor, the code, the shape and the bytes to store.
    """

    __slots__ = ("_at", "_mover", "_payload", "_wrap")

    def __init__(
        self,
        wrap: _native.Wrap,
        mover: Callable[[Any], Callable[[Any], Tensor] | None],
        at: Callable[[Any, Any], Any],
        payload: Payload,
    ) -> None:
        self._wrap = wrap
        self._mover = mover
        self._at = at
        self._payload = payload

    @overload
    def load_file(
        self,
        filename: Source,
        device: Any = None,
        *,
        return_metadata: Literal[True],
        **options: Unpack[LoadOptions],
    ) -> tuple[dict[str, Tensor], dict[str, str] | None]: ...

    @overload
    def load_file(
        self,
        filename: Source,
        device: Any = None,
        *,
        return_metadata: Literal[False] = False,
        **options: Unpack[LoadOptions],
    ) -> dict[str, Tensor]: ...

    def load_file(
        self,
        filename: Source,
        device: Any = None,
        *,
        backend: str = "auto",
        keys: Iterable[str] | None = None,
        prefix: str | tuple[str, ...] | None = None,
        where: Callable[[TensorInfo], object] | None = None,
        slices: Mapping[str, Any] | None = None,
        threads: int | None = None,
        progress: Progress = False,
        storage_options: StorageOptions | None = None,
        return_metadata: bool = False,
        verify: bool = False,
        expected_sha256: str | None = None,
    ) -> dict[str, Tensor] | tuple[dict[str, Tensor], dict[str, str] | None]:
        """Load the tensors of a file, or some of them, or parts of them.

        Parameters
        ----------
        filename : str, bytes, os.PathLike, or an object to read from
            A `.safetensors` or a `.bt` file, the index of a sharded checkpoint, a directory with one of
            these, a URL, or an object that holds a file, such as an open file, a buffer or `ingot.Ranges`: as
            for `ingot.safe_open`.
        device : str, int or the framework's device, optional
            Where the tensors shall be; the module says which devices its framework takes. By default where
            upstream puts them: on the framework's default device, and paddle's on the CPU.
        backend : {"auto", "mmap", "pread"}
            As for `ingot.safe_open`.
        keys, prefix, where, slices : optional
            As for `ingot.numpy.load_file`: which tensors, and how much of each. Nothing else is read.
        threads, progress : optional
            As for `ingot.numpy.load_file`.
        storage_options : dict, optional
            How a URL is reached (`ingot.StorageOptions`).
        return_metadata : bool
            Return the metadata too, of the same look at the file.
        verify : bool
            Compare the tensors with the digests that the file keeps of them (`ingot.verify`), or where it
            keeps none with ModelSpec's, and give nothing when one differs. They are then copies in memory
            of their own, whatever the backend, compared on the way into it. Not with `slices`.
        expected_sha256 : str, optional
            The SHA-256 of the whole file, to be compared likewise. All of the file is read then.

        Returns
        -------
        dict of str to tensor
            In the order of `keys`, else of the file, with the shape of the header. The module says which
            tensors are views of the file and which are copies. With `return_metadata` a tuple of this and of
            what `ingot.read_metadata` gives.

        Raises
        ------
        OSError
            The file cannot be opened.
        HeaderError
            The file breaks a rule of its format; ``code`` says which.
        CheckpointError
            The index breaks a rule, or the shards do not hold what it says.
        DtypeError
            The framework lacks a tensor's dtype or cannot hold its shape. `ingot.safe_open` reads the other
            tensors.
        TensorNotFoundError
            `keys` or `slices` name a tensor that the file does not have, and the message the nearest name; or
            no name begins with `prefix`.
        SliceError
            An index does not fit its tensor.
        StorageError
            Reading failed.
        IntegrityError
            A tensor, or the file, is not what its digest says (``code`` is ``"digest-mismatch"``); the
            file keeps no digest of a tensor (``"no-digest"``), or a record that cannot be used
            (``"invalid-checksums"``).
        OptionError
            `device`, `backend` or `threads` is not one of the choices; or `slices` have a tensor that the
            other options leave out, or cannot be compared.
        """
        move = self._mover(device)
        selected: Selected[Tensor] = Selected(keys, prefix, where, slices)
        checkpoint = _open.open_checkpoint(filename, backend, storage_options=storage_options)
        with reading(checkpoint, threads, progress, (verify, expected_sha256)) as how:
            found = chosen(checkpoint, selected, self._wrap, move, how, self._at)
        return (found, checkpoint.metadata()) if return_metadata else found

    def load(self, data: Buffer, device: Any = None) -> dict[str, Tensor]:
        """Load all tensors from the bytes of a file.

        Parameters
        ----------
        data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
            A whole file, in either format: its content decides. It is copied and may change afterwards.
        device : str, int or the framework's device, optional
            As for `load_file`.

        Returns
        -------
        dict of str to tensor
            As `load_file` gives them.

        Raises
        ------
        TypeError
            `data` is not a buffer.
        HeaderError, DtypeError, OptionError
            As `load_file` does.
        """
        move = self._mover(device)
        return _load.tensors(_native.Checkpoint.from_buffer(data), None, self._wrap, move)

    def save(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        format: Format = "safetensors",
    ) -> bytes:
        """Give the bytes of a file that holds these tensors.

        Parameters
        ----------
        tensors : dict of str to tensor
            Of any layout and on any device. What is stored is the tensor's values in C order, little-endian.
        metadata : dict of str to str, optional
            Text to store beside the tensors. What speaks of the tensors of another file is left out: digests,
            ``modelspec.hash_sha256``, names that share a tensor.
        format : {"safetensors", "bintensors"}
            What to write.

        Returns
        -------
        bytes
            The same for the same input (FORMAT.md, "Writing").

        Raises
        ------
        TypeError
            `tensors` is not a dict, a value is not a tensor (a dict within the dict is none), or a name, a
            key or a value of the metadata is not a str.
        SaveError
            A tensor has no plain values, the format lacks its dtype, a name is reserved, or no header can
            hold the tensors.
        OptionError
            `format` is not one of the two.
        """
        return _native.serialize(
            named(tensors, value="tensor"), self._payload, texts(metadata), known_format(format)
        )

    @overload
    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path,
        metadata: Mapping[str, str] | None = None,
        *,
        background: Literal[True],
        **options: Unpack[SaveOptions],
    ) -> Future[None]: ...

    @overload
    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path,
        metadata: Mapping[str, str] | None = None,
        *,
        background: Literal[False] = False,
        **options: Unpack[SaveOptions],
    ) -> None: ...

    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path,
        metadata: Mapping[str, str] | None = None,
        *,
        format: Format | None = None,
        durable: bool | None = None,
        atomic: bool = True,
        force: bool = False,
        progress: Progress = False,
        background: bool = False,
        snapshot: bool = True,
        reserve_header: int = 0,
        align: Align = 8,
        checksums: Checksums = None,
    ) -> Future[None] | None:
        """Save tensors to a file.

        Parameters
        ----------
        tensors, metadata
            As for `save`.
        filename : str, bytes or os.PathLike
            Where to write. A file of that name is replaced, also when the tensors were loaded from it.
        format : {"safetensors", "bintensors"}, optional
            What to write. By default ``.bt`` at the end of the file name means bintensors, every other name
            safetensors.
        durable : bool, optional
            Flush the file and its directory to the disk before returning. True by default, unless the
            environment has ``INGOT_DURABLE=0``.
        atomic : bool
            Write beside the file and rename, so that readers see the old file or the new one, whole. False
            overwrites in place.
        force : bool
            Replace a read-only file too.
        progress : bool or callable
            True shows a bar: tqdm's if it is installed, else a line on standard error. A callable is told
            ``(bytes done, bytes in all)`` about twenty times a second and at the end, and may raise to
            stop the save; the old file stays then.
        background : bool
            Return a `concurrent.futures.Future` soon, and write in a thread. What goes wrong while writing
            is raised by its ``result()``. Such saves follow one another in the order of the calls. The
            interpreter does not exit before they are done.
        snapshot : bool
            With `background`: copy the tensors before returning, so that they may change while they are
            written. False copies nothing; they must then stay as they are until the future is done, and
            what a device still computes must be finished.
        reserve_header : int
            Bytes of room in the header, so that `ingot.update_metadata` need not write the file anew. They
            are spaces that every reader passes over (FORMAT.md, "Room for later edits, and alignment").
        align : {8, 64, 4096}
            What the position of the data in the file is a multiple of, by more such spaces. Neither for
            bintensors.
        checksums : bool, str or sequence of str, optional
            Digests to keep in the metadata, for `ingot.verify` and ``load_file(verify=True)``: of each
            tensor, by ``"blake3"`` (which True means too), ``"sha256"``, ``"xxh3"`` or ``"xxh3_128"``; of
            the data section as ModelSpec wants it, ``"modelspec"``; or one of the former and the latter.
            They are taken of the bytes on their way into the file. What `metadata` has of this is left out:
            it was made for another file.

        Returns
        -------
        None or concurrent.futures.Future
            The future of a save in the background, whose result is None.

        Raises
        ------
        OSError
            The file or its directory cannot be opened for writing.
        StorageError
            Writing failed. What stood under that name before still stands there if `atomic`.
        TypeError, SaveError, OptionError
            As `save` does, and before the disk is touched.
        """
        return write_file(
            filename,
            named(tensors, value="tensor"),
            self._payload,
            metadata,
            format=format,
            durable=durable,
            atomic=atomic,
            force=force,
            progress=progress,
            background=background,
            snapshot=snapshot,
            reserve_header=reserve_header,
            align=align,
            checksums=checksums,
        )
