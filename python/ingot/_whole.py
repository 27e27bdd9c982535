"""`load`, `load_file`, `save` and `save_file` for frameworks that differ in their tensors only."""

from __future__ import annotations

from typing import Generic, TypeVar

from . import _native, _open
from ._serialize import known_format, named, texts, write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from typing_extensions import Buffer

    from ._serialize import Checksums, Format, Path, Payload

Tensor = TypeVar("Tensor")


class Whole(Generic[Tensor]):
    """Whole files of one framework's tensors. Its methods are the functions of that framework's module.

    Parameters
    ----------
    wrap : Wrap
        How bytes become tensors.
    mover : callable
        Gives, for a device, what takes a tensor there; None where it may stay.
    payload : callable
        Gives, for a name and a tensor, the code, the shape and the bytes to store.
    """

    __slots__ = ("_mover", "_payload", "_wrap")

    def __init__(
        self,
        wrap: _native.Wrap,
        mover: Callable[[Any], Callable[[Any], Tensor] | None],
        payload: Payload,
    ) -> None:
        self._wrap = wrap
        self._mover = mover
        self._payload = payload

    def load_file(
        self,
        filename: Path,
        device: Any = None,
        *,
        backend: str = "auto",
        verify: bool = False,
        expected_sha256: str | None = None,
    ) -> dict[str, Tensor]:
        """Load all tensors of a file.

        Parameters
        ----------
        filename : str, bytes or os.PathLike
            A `.safetensors` or a `.bt` file. The content decides which, not the name.
        device : str, int or the framework's device, optional
            Where the tensors shall be; the module says which devices its framework takes. By default where
            upstream puts them: on the framework's default device, and paddle's on the CPU.
        backend : {"auto", "mmap", "pread"}
            As for `ingot.safe_open`.
        verify : bool
            Compare the tensors with the digests that the file keeps of them (`ingot.verify`), or where it
            keeps none with ModelSpec's, and give nothing when one differs. They are then copies in memory of
            their own, whatever the backend, compared on the way into it.
        expected_sha256 : str, optional
            The SHA-256 of the whole file, to be compared likewise.

        Returns
        -------
        dict of str to tensor
            In the order of the file, with the shape of the header. The module says which tensors are views of
            the file and which are copies.

        Raises
        ------
        OSError
            The file cannot be opened.
        HeaderError
            The file breaks a rule of its format; ``code`` says which.
        DtypeError
            The framework lacks a tensor's dtype or cannot hold its shape. `ingot.safe_open` reads the other
            tensors.
        StorageError
            Reading failed.
        IntegrityError
            A tensor, or the file, is not what its digest says (``code`` is ``"digest-mismatch"``); the file
            keeps no digest of a tensor (``"no-digest"``), or a record that cannot be used
            (``"invalid-checksums"``).
        OptionError
            `device` or `backend` is not one of the choices.
        """
        move = self._mover(device)
        return _open.tensors(
            _open.open_archive(filename, backend), None, self._wrap, move, (verify, expected_sha256)
        )

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
        return _open.tensors(_native.Archive.from_buffer(data), None, self._wrap, move)

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
            Text to store beside the tensors.
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
        checksums: Checksums = None,
    ) -> None:
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
        checksums : str or sequence of str, optional
            Digests to keep in the metadata, for `ingot.verify` and ``load_file(verify=True)``: of each
            tensor, by ``"blake3"``, ``"sha256"``, ``"xxh3"`` or ``"xxh3_128"``; of the data section as
            ModelSpec wants it, ``"modelspec"``; or one of the former and the latter. They are taken of what
            is in the file before it gets its name. Digests of tensors in `metadata` are left out: they were
            made for another file.

        Raises
        ------
        OSError
            The file or its directory cannot be opened for writing.
        StorageError
            Writing failed. What stood under that name before still stands there if `atomic`.
        TypeError, SaveError, OptionError
            As `save` does, and before the disk is touched.
        """
        write_file(
            filename,
            named(tensors, value="tensor"),
            self._payload,
            metadata,
            format=format,
            durable=durable,
            atomic=atomic,
            force=force,
            checksums=checksums,
        )
