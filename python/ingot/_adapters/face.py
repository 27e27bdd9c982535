"""`load`, `load_file`, `save` and `save_file` for frameworks that differ in their tensors only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Unpack, overload

from ingot import _native
from ingot._base.checks import known_format, named
from ingot._base.options import Loading, Saving, argument, check_names, checked, takes
from ingot._native import Checkpoint, Export, Gpu
from ingot._read import door
from ingot._read import load as _load
from ingot._read.door import Reads
from ingot._read.load import At, Into, chosen
from ingot._read.moves import Carrier, Moving, placed
from ingot._read.select import Selected
from ingot._write.save import Payload, write_file
from ingot.typing import Buffer, Device, Format, LoadOptions, NoOptions, Path, SaveOptions, Source, Writable

if TYPE_CHECKING:
    from ingot._base.options import AtOnce, InBackground, WithMetadata, WithoutMetadata
    from ingot._write.background import SaveFuture

Tensor = TypeVar("Tensor")


class Whole(NamedTuple, Generic[Tensor]):
    """Whole files of one framework's tensors. Its methods are the functions of that framework's module."""

    #: Turns bytes into tensors.
    wrap: _native.Wrap
    #: Returns the function that moves a tensor to a device; None if tensors stay where they are.
    mover: Callable[[Any], Callable[[Any], Tensor] | Gpu | Carrier | None]
    #: Indexes a tensor by the framework's own rules.
    at: At
    #: Returns the code, the shape and the bytes to store.
    payload: Payload
    #: The word for a tensor in messages.
    value: str = "tensor"
    #: Exports many tensors at once, before `payload` is called.
    export: Export | None = None
    #: Reads into tensors that exist already.
    into: Into | None = None

    @overload
    def load_file(
        self, filename: Source, device: Device = None, **options: Unpack[WithMetadata]
    ) -> tuple[dict[str, Tensor], dict[str, str] | None]: ...

    @overload
    def load_file(
        self, filename: Source, device: Device = None, **options: Unpack[WithoutMetadata]
    ) -> dict[str, Tensor]: ...

    @takes(LoadOptions)
    def load_file(
        self,
        filename: Source,
        device: Device = None,
        *,
        return_metadata: bool = False,
        **options: Unpack[LoadOptions],
    ) -> dict[str, Tensor] | tuple[dict[str, Tensor], dict[str, str] | None]:
        """Load the tensors of a file, or some of them, or parts of them.

        Parameters
        ----------
        filename : str, bytes, os.PathLike, or an object to read from
            A `.safetensors` or a `.bt` file, the index of a sharded checkpoint, a directory with one of
            these, a URL, or an object that holds a file, such as an open file, a buffer or `ingot.Ranges`: as
            for `ingot.safe_open`.
        device : str, int, the framework's device, dict or callable, optional
            Where the tensors are placed; the module documents the devices of its framework. The default is
            upstream's: the framework's default device, and the CPU for paddle. A dict maps patterns of names
            to devices, such as ``{"layers.0.*": "gpu:0", "*": "cpu"}``. ``*`` is any text and ``?`` one
            character. The first match decides, and each pattern must match a tensor. A callable receives the
            result of `ingot.safe_open.info` and returns the device.
        return_metadata : bool
            Return the metadata too, read from the same version of the file.
        **options
            Which tensors are loaded and how: `ingot.typing.LoadOptions`.

        Returns
        -------
        dict of str to tensor
            In the order of `keys`, else of the file, with the shape of the header. The module documents which
            tensors are views of the file and which are copies. With `return_metadata`, a tuple of the dict
            and the metadata of the file.

        Raises
        ------
        OSError
            The file cannot be opened.
        HeaderError
            The file breaks a rule of its format; ``code`` says which.
        CheckpointError
            The index breaks a rule, or the shards differ from the index.
        DtypeError
            The framework lacks a tensor's dtype or cannot hold its shape. `ingot.safe_open` reads the other
            tensors.
        TensorNotFoundError
            A name or pattern of `keys`, `drop` or `slices` matches nothing. The message has the nearest name.
        SliceError
            An index does not fit its tensor.
        StorageError
            Reading failed.
        IntegrityError
            A tensor, or the file, differs from its digest (``code`` is ``"digest-mismatch"``); the
            file keeps no digest of a tensor (``"no-digest"``), or a record that cannot be used
            (``"invalid-checksums"``).
        OptionError
            `device`, `backend`, `dtype` or `threads` is not one of the choices, no pattern of `device`
            matches a name, the other options leave out a tensor of `slices`, or the digests cannot be
            compared.

        Examples
        --------
        >>> tensors = load_file("model.safetensors", keys="lm_head.*")
        >>> {name: list(tensor.shape) for name, tensor in tensors.items()}
        {'lm_head.weight': [8, 4]}
        """
        if return_metadata is not False:
            checked(self.load_file, {"return_metadata": return_metadata})
        move = placed(self.load_file, self.mover, device)
        return self.loaded(filename, move, Loading.of(self.load_file, options, filename), return_metadata)

    def loaded(
        self,
        filename: Source,
        move: Moving,
        how: Loading,
        return_metadata: bool,
        out: Mapping[str, Tensor | list[Tensor]] | None = None,
    ) -> dict[str, Tensor] | tuple[dict[str, Tensor], dict[str, str] | None]:
        """Return the result of `load_file`. `out` has destinations for some of the tensors."""
        selected = Selected.by(how, out) if out is not None or how.selects else None

        def work(
            checkpoint: Checkpoint, reads: Reads
        ) -> dict[str, Tensor] | tuple[dict[str, Tensor], dict[str, str] | None]:
            found = chosen(checkpoint, selected, self.wrap, move, reads, self.at, self.into)
            return (found, checkpoint.metadata()) if return_metadata else found

        return door.loaded(filename, how, work)

    @takes()
    def load(self, data: Buffer, device: Device = None, **options: Unpack[NoOptions]) -> dict[str, Tensor]:
        """Load all tensors from the bytes of a file.

        Parameters
        ----------
        data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
            A whole file, in either format: its content decides. It is copied and may change afterwards.
        device : str, int, the framework's device, dict or callable, optional
            As for `load_file`.

        Returns
        -------
        dict of str to tensor
            As for `load_file`.

        Raises
        ------
        TypeError
            `data` is not a buffer.
        HeaderError, DtypeError, OptionError
            As `load_file` does.

        Examples
        --------
        >>> with open("model.safetensors", "rb") as file:
        ...     tensors = load(file.read())
        >>> sorted(tensors)
        ['lm_head.weight', 'wte']
        """
        check_names(self.load, options)
        move = placed(self.load, self.mover, device)
        checkpoint = argument(self.load, "data", data, _native.Checkpoint.from_buffer)
        return _load.tensors(checkpoint, None, self.wrap, move)

    @takes()
    def save(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        format: Format = "safetensors",
        **options: Unpack[NoOptions],
    ) -> bytes:
        """Return the bytes of a file that holds these tensors.

        Parameters
        ----------
        tensors : dict of str to tensor
            With any layout, on any device. The values are stored in C order, little-endian.
        metadata : dict of str to str, optional
            Text to store beside the tensors. Keys that describe the tensors of another file are left out:
            ``ingot.checksums``, ``modelspec.hash_sha256``, ``ingot.shared``, and signatures
            (``c2pa:manifest``, ``c2pa:manifest.uri``, ``__signature__``, ``sigstore``, ``vouch_credential``).
        format : {"safetensors", "bintensors"}
            The file format.

        Returns
        -------
        bytes
            The same bytes for the same input (FORMAT.md, "Writing").

        Raises
        ------
        TypeError
            `tensors` is not a dict, a value is not a tensor (such as a nested dict), or a name, a
            key or a value of the metadata is not a str.
        SaveError
            A tensor has no plain values, the format lacks its dtype, a name is reserved, or no header can
            hold the tensors.
        OptionError
            `format` is not one of the two.

        Examples
        --------
        >>> data = save(load_file("model.safetensors"), {"title": "Tiny"})
        >>> sorted(load(data))
        ['lm_head.weight', 'wte']
        """
        return self.saved_bytes(self.save, tensors, {"metadata": metadata, "format": format, **options})

    def saved_bytes(
        self, function: Callable[..., Any], tensors: Mapping[str, Any], options: Mapping[str, Any]
    ) -> bytes:
        """Do the work of `save` for the calling `function`."""
        given = checked(function, options, format=known_format)
        values = self._named(function, tensors)
        return _native.serialize(values, self.payload, **given, export=self.export)

    def _named(self, function: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first argument of `function` as a dict of the caller's own."""
        name = next(iter(function._taken))
        found: dict[str, Any] = argument(function, name, tensors, partial(named, value=self.value))
        return found

    @overload
    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[InBackground],
    ) -> SaveFuture: ...

    @overload
    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path | Writable,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[AtOnce],
    ) -> None: ...

    @takes(SaveOptions, overwrite=True)
    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: Path | Writable,
        metadata: Mapping[str, str] | None = None,
        *,
        background: bool = False,
        **options: Unpack[SaveOptions],
    ) -> SaveFuture | None:
        """Save tensors to a file.

        Parameters
        ----------
        tensors, metadata
            As for `save`.
        filename : str, bytes, os.PathLike, or an object with a ``write``
            Where to write. An existing file is replaced, even if the tensors were loaded from it. An object,
            such as an open binary file or `io.BytesIO`, gets the bytes of the file in pieces
            (`ingot.typing.Writable`).
        background : bool
            Write in a thread and return an `ingot.SaveFuture` early. Errors while writing are raised by its
            ``result()``; once its ``staged`` is done, the tensors may change. Background saves run in the
            order of the calls. The interpreter waits for pending saves at exit. If nothing asks for the
            result of a failed save, the next save warns (`RuntimeWarning`), and the error is printed on
            standard error at exit.
        **options
            How the file is written: `ingot.typing.SaveOptions`.

        Returns
        -------
        None or ingot.SaveFuture
            The future of a save in the background, whose result is None.

        Raises
        ------
        OSError
            The file or its directory cannot be opened for writing. `FileExistsError` if the file exists and
            `overwrite` is False.
        StorageError
            Writing failed. An existing file is unchanged unless `atomic` is False.
        TypeError, SaveError, OptionError
            As `save` does, and before the disk is touched.

        Examples
        --------
        >>> tensors = load_file("model.safetensors")
        >>> save_file(tensors, "copy.safetensors", {"title": "Tiny"})
        >>> saving = save_file(tensors, "copy.safetensors", background=True)
        >>> saving.result()
        """
        return self.saved(self.save_file, tensors, filename, Saving.of(self.save_file, locals()))

    def saved(
        self,
        function: Callable[..., Any],
        tensors: Mapping[str, Any],
        filename: Path | Writable,
        how: Saving,
    ) -> SaveFuture | None:
        """Do the work of `save_file` for the calling `function`."""
        return write_file(filename, self._named(function, tensors), self.payload, how, export=self.export)
