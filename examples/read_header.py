"""Read just the header of a file, of whatever size, and print a table of its tensors.

``python examples/read_header.py model.safetensors``
"""

import sys

import ingot


def main(path: str) -> None:
    """Print what the header of the file at `path` says."""
    with ingot.safe_open(path, framework="np") as handle:
        for name in handle.offset_keys():
            tensor = handle.info(name)
            # A name may hold anything, also what steers a terminal.
            shown = name.encode("unicode_escape").decode() if not name.isprintable() else name
            print(f"{tensor.dtype:12} {list(tensor.shape)!s:20} {tensor.nbytes:>14} bytes  {shown}")
        for key, value in (handle.metadata() or {}).items():
            print(f"{key!r} = {value!r}")
        print(f"{handle.format}: {len(handle)} tensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: read_header.py FILE")
    main(sys.argv[1])
