"""The command line of a bench, and its working directory."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def parser(
    doc: str | None, rounds: int | None = 5, *, room: str = "", scaled: bool = False, figures: bool = False
) -> argparse.ArgumentParser:
    """Return the parser for the bench of this docstring; `room` is the disk space of its files."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    same = "; each row has its own by default" if rounds is None else ""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each side is measured{same}")
    if room:
        parser.add_argument(
            "--dir", type=Path, help=f"where to put the files: {room} (default: a temporary directory)"
        )
    if scaled:
        parser.add_argument(
            "--scale", type=float, default=1.0, help="shrink counts and sizes, for trying the code"
        )
    if figures:
        parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser


@contextmanager
def place(directory: Path | None = None) -> Iterator[Path]:
    """A new directory in `directory`, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=directory) as made:
        yield Path(made)
