"""A FUSE mount of a directory: read-only, with a delay, and with a byte that cannot be read.

As a program it serves the mount. `missing` returns a missing requirement.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# The number of simultaneous reads, as on a network.
AT_ONCE = 64


def missing() -> str | None:
    """Return the missing requirement of a mount, or None."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed"
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        return "mfusepy is not installed"
    except OSError as error:
        return f"libfuse is not installed: {error}"
    return None


@contextmanager
def mounted(
    shown: Path, place: Path, *, delay: float = 0.0, broken: int | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Show the directory `shown` at `place`. Reads take `delay` seconds; reads of the byte `broken` fail.

    `log` receives the size of each read, one per line.
    """
    place.mkdir(exist_ok=True)
    noted = os.devnull if log is None else str(log)
    arguments = [str(shown), str(place), str(delay), str(-1 if broken is None else broken), noted]
    server = subprocess.Popen([sys.executable, __file__, *arguments], stderr=subprocess.PIPE)
    with ExitStack() as ending:
        # In reverse order of their use. Each step works even if another failed.
        assert server.stderr is not None
        ending.callback(server.stderr.close)
        ending.callback(server.wait)
        ending.callback(server.kill)
        ending.callback(unmount, place)
        for _ in range(600):
            if os.path.ismount(place):
                break
            if server.poll() is not None:
                raise RuntimeError(f"no mount: {server.stderr.read().decode()}")
            time.sleep(0.05)
        else:
            raise RuntimeError("no mount after half a minute")
        yield server


def unmount(place: Path) -> None:
    """Unmount `place` if it is a mount, even if a failed test still has files of it open."""
    subprocess.run(["fusermount3", "-u", "-z", place], check=False, capture_output=True)


def serve(shown: str, place: str, delay: float, broken: int, log: str) -> None:
    """Mount, and answer until it is unmounted."""
    from mfusepy import FUSE, FuseOSError, Operations

    noted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Disk(Operations):  # type: ignore[misc,unused-ignore]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            try:
                found = os.lstat(shown + path)
            except OSError as error:
                raise FuseOSError(error.errno) from error
            names = ("mode", "nlink", "uid", "gid", "size")
            return {f"st_{name}": getattr(found, f"st_{name}") for name in names} | {
                f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")
            }

        def init_with_config(self, connection: Any, config: Any) -> None:
            # By default the kernel sends 12 requests at once.
            if connection is not None:
                connection.max_background = connection.congestion_threshold = AT_ONCE

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(shown + path)]

        def open(self, path: str, flags: int) -> int:
            return os.open(shown + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(delay)
            os.write(noted, f"{size}\n".encode())
            if offset <= broken < offset + size:
                raise FuseOSError(errno.EIO)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    # libfuse has 10 threads by default.
    FUSE(Disk(), place, foreground=True, ro=True, max_threads=AT_ONCE)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
