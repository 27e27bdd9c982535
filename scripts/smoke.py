"""Test an installed wheel without a framework: `python smoke.py`, in any folder, takes seconds.

If numpy is installed, arrays are tested too.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import ingot

VALUES = bytes(range(256)) * 4096
# The largest size on x86-64, without debug symbols, which would add 30 MB.
LARGEST_LIBRARY_NBYTES = 8_000_000


def library() -> None:
    """Check that the extension module is stripped."""
    nbytes = Path(ingot._native.__file__).stat().st_size
    assert nbytes <= LARGEST_LIBRARY_NBYTES, f"the extension module has {nbytes:,} bytes"


def files(folder: Path) -> None:
    """Write, open, verify and damage files in both formats."""
    tensors = {"a": {"dtype": "F32", "shape": [1024, 256], "data": VALUES}}
    for name in ("model.safetensors", "model.bt"):
        path = folder / name
        ingot.serialize_file(tensors, path, {"step": "1"}, checksums="blake3")
        assert ingot.inspect(path).metadata["step"] == "1"
        assert ingot.hash(path) == hashlib.sha256(path.read_bytes()).hexdigest()
        assert ingot.verify(path)
        ((tensor, entry),) = ingot.deserialize(path.read_bytes())
        assert (tensor, bytes(entry["data"])) == ("a", VALUES)
        assert ingot.inspect(path).parameter_total == len(VALUES) // 4
        path.write_bytes(path.read_bytes()[:-1])
        assert refusal(path) == "truncated"


def refusal(path: Path) -> str | None:
    """Return the code of the error that opening a file raises."""
    try:
        ingot.inspect(path)
    except ingot.HeaderError as error:
        return error.code
    return None


def arrays(folder: Path) -> None:
    """Save and load arrays, whole and in part, with each backend."""
    import numpy as np

    from ingot.numpy import load_file, save_file

    path = folder / "arrays.safetensors"
    saved = np.arange(6000, dtype=np.float32).reshape(100, 60)
    save_file({"a": saved.T}, path)
    for backend in ("mmap", "pread"):
        assert (load_file(path, backend=backend)["a"] == saved.T).all()
        with ingot.safe_open(path, "np", backend=backend) as file:
            assert (file.get_slice("a")[3:5, ::7] == saved.T[3:5, ::7]).all()


def main() -> None:
    """Test everything, and print what was tested."""
    if platform.machine() in ("AMD64", "x86_64"):
        library()
    with tempfile.TemporaryDirectory() as folder:
        files(Path(folder))
        done = "files"
        if find_spec("numpy"):
            arrays(Path(folder))
            done = "files, arrays"
    print(f"ingot {ingot.__version__}: {done}: Python {platform.python_version()} on {platform.machine()}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
