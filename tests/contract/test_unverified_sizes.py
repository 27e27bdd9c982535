"""Nothing is allocated by a claimed size before a read has confirmed it.

Servers, stores, open files, sparse files, indices and headers claim any size here. Each call ends with an
error, or does work that is bounded, in a child process whose memory is limited.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Answer, Handler, Request, serving

resource = pytest.importorskip("resource", reason="this system limits no memory")

#: Limits of a child, for its address space and its resident memory. An interpreter with numpy takes a tenth.
ADDRESSES = 4 << 30
RESIDENT_MIB = 700

DICE = random.Random(46)
SIZES = [
    1 << 30,
    10**12,
    10**14,
    10**18,
    *(DICE.randrange(1 << bits, 2 << bits) for bits in range(31, 63, 6)),
    2**63 - 1,
    2**63,
    2**64 - 1,
]
#: The bits of a tensor are counted with 64 bits.
MOST_NBYTES = 2**61
NO_SIZES = [-5, -1, 2**63, 2**70, True, False, 1.5, float("nan"), "7", b"7"]

#: Runs each of the named calls on one source, and prints how each ended.
PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
# Without it, a system user could reserve most of the disk that other tests write to.
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 30,) * 2)
import numpy as np
import ingot, ingot.numpy

class Claimed:
    "A store, a file system of fsspec and an open file that claim a size and hold nothing behind the head."
    def __init__(self, head, size): self.start, self.size, self.at = head + bytes(1 << 18), size, 0
    def bytes(self, begin, end): return self.start[begin:end]
    # obstore's
    def head(self, path): return {"size": self.size}
    def get_ranges(self, path, *, starts, ends): return [self.bytes(*both) for both in zip(starts, ends)]
    # of an open file
    def read(self, count=-1):
        found = self.bytes(self.at, self.at + count)
        self.at += len(found)
        return found
    def seek(self, at, whence=0): self.at = self.size + at if whence == 2 else at; return self.at
    def tell(self): return self.at

class FileSystem:
    def __init__(self, claimed): self.claimed = claimed
    def info(self, path): return {"size": self.claimed.size}
    def cat_ranges(self, paths, starts, ends, on_error=""):
        return self.claimed.get_ranges("", starts=starts, ends=ends)
    def unstrip_protocol(self, path): return "fake://" + path

def source(kind, value):
    if kind in ("url", "path"): return value
    head, size = bytes.fromhex(value["head"]), value["size"]
    claimed = Claimed(head, float("nan") if size == "nan" else size)
    return {"obstore": lambda: ingot.Ranges(claimed, "m.safetensors"),
            "fsspec": lambda: ingot.Ranges(FileSystem(claimed), "m.safetensors"),
            "given": lambda: ingot.Ranges(claimed, "m.safetensors", nbytes=claimed.size),
            "file": lambda: claimed}[kind]()

def opened(given):
    return ingot.safe_open(given, "np", **extra(given))

def extra(given):
    return {"storage_options": {"retries": 0}} if isinstance(given, str) and given.startswith("http") else {}

CALLS = {
    "open": lambda given: len(opened(given)),
    "hash sha256": lambda given: ingot.hash(given, "sha256", **extra(given)),
    "hash blake3": lambda given: ingot.hash(given, "blake3", **extra(given)),
    "hash autov3": lambda given: ingot.hash(given, "autov3", **extra(given)),
    "verify": lambda given: ingot.verify(given, **extra(given)),
    "load": lambda given: ingot.numpy.load_file(given, **extra(given)),
    "tensor": lambda given: opened(given)["t"],
    "rows": lambda given: opened(given).get_slice("t")[5:9],
    "last": lambda given: opened(given).get_slice("t")[-3:],
    "warm": lambda given: ingot.warm(given),
    "merge": lambda given: ingot.merge([given], "merged.safetensors", **extra(given)),
    "download": lambda given: ingot.download(given, "fetched.safetensors", **extra(given)),
}
for number, (kind, value, calls) in enumerate(json.loads(sys.stdin.read())):
    for call in calls:
        try:
            CALLS[call](source(kind, value))
            outcome = "done"
        except Exception as error:
            outcome = f"{type(error).__name__} {getattr(error, 'code', '')}"
        # Not ru_maxrss, which a child inherits from the process that starts it.
        peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10
        print(json.dumps([number, call, outcome, peak]), flush=True)
"""


def outcomes(folder: Path, rows: list[tuple[str, object, list[str]]]) -> list[tuple[str, str, str]]:
    """Run the calls of all rows in one child. Check that each ended and that the child used little memory."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ADDRESSES)],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
        check=False,
    )
    ended = [json.loads(line) for line in child.stdout.splitlines()]
    expected = [(number, call) for number, row in enumerate(rows) for call in row[2]]
    assert [(number, call) for number, call, *_ in ended] == expected, child.stderr[-2000:]
    assert child.returncode == 0, child.stderr[-2000:]
    assert max(peak for *_, peak in ended) < RESIDENT_MIB
    return [(rows[number][0], call, outcome) for number, call, outcome, _ in ended]


def head_of(nbytes: int) -> bytes:
    """Return the head of a file with one tensor and its digest, for a file of this size."""
    size = nbytes - 1024
    digests = json.dumps({"algorithm": "blake3", "tensors": {"t": "00" * 32}})
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": {"ingot.checksums": digests}, "t": entry}).encode()
    return struct.pack("<Q", 1016) + text.ljust(1016)


def claiming(nbytes: int) -> Answer:
    """Serve the head of a file that claims this size, and no bytes after the head."""
    head = head_of(nbytes)

    def answer(handler: Handler, request: Request) -> None:
        begin, end = request.range
        end = min(end, nbytes)
        part = (head + bytes(1 << 17))[:end] if begin == 0 else b""
        handler.close_connection = True
        handler.head(
            206,
            Content_Range=f"bytes {begin}-{end - 1}/{nbytes}",
            Content_Length=end - begin,
            ETag='"v1"',
        )
        handler.body(part)

    return answer


def test_readers_survive_servers_that_claim_any_size(tmp_path: Path) -> None:
    calls = ["open", "hash sha256", "hash blake3", "hash autov3", "verify", "load", "tensor", "rows", "last"]
    calls += ["merge", "download"]
    with ExitStack() as servers:
        urls = [servers.enter_context(serving(claiming(nbytes))).url() for nbytes in SIZES]
        found = outcomes(tmp_path, [("url", url, calls) for url in urls])
    sizes = [nbytes for nbytes in SIZES for _ in calls]
    for nbytes, (_, call, outcome) in zip(sizes, found, strict=True):
        # The first bytes exist.
        is_there = call in ("open", "rows") and nbytes < MOST_NBYTES
        assert (outcome == "done") == is_there, (nbytes, call, outcome)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("command", [("stats", "--all"), ("view", "--html", "page.html"), ("diff",)])
def test_commands_survive_servers_that_claim_any_size(tmp_path: Path, command: tuple[str, ...]) -> None:
    nbytes = 2 * 10**14
    with serving(claiming(nbytes)) as server, serving(claiming(nbytes)) as other:
        urls = [server.url(), other.url()] if command == ("diff",) else [server.url()]
        child = subprocess.run(
            [Path(sys.executable).with_name("ingot"), *command, *urls],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES)),
            timeout=240,
            check=False,
        )
    assert child.returncode in (0, 1), child.stderr
    assert "memory allocation" not in child.stderr


@pytest.mark.parametrize("kind", ["obstore", "fsspec", "file", "given"])
def test_readers_survive_objects_that_claim_any_size(tmp_path: Path, kind: str) -> None:
    sizes = [size for size in SIZES if size < MOST_NBYTES]
    rows = [
        (kind, {"head": head_of(size).hex(), "size": size}, ["open", "load", "tensor", "last"])
        for size in sizes
    ]
    for _, call, outcome in outcomes(tmp_path, rows):
        assert (outcome == "done") == (call == "open"), (call, outcome)


@pytest.mark.parametrize("kind", ["obstore", "fsspec", "file"])
def test_readers_reject_objects_that_claim_an_impossible_size(tmp_path: Path, kind: str) -> None:
    named = [size for size in NO_SIZES if not isinstance(size, bytes)]
    rows = [(kind, {"head": "", "size": "nan" if size != size else size}, ["open"]) for size in named]
    for row, (_, _, outcome) in zip(rows, outcomes(tmp_path, rows), strict=True):
        # If the size is NaN, the arithmetic of the file object fails.
        expected = "read" if row[0] == "file" and row[1]["size"] == "7" else "impossible-size"
        assert outcome == f"StorageError {expected}", (row, outcome)


@pytest.mark.parametrize("nbytes", [2**63, 2**70])
def test_ranges_rejects_a_size_that_no_file_has(nbytes: int) -> None:
    class Store:
        def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
            raise AssertionError("it is not asked")

    with pytest.raises(ingot.OptionError) as caught:
        ingot.Ranges(Store(), "m.safetensors", nbytes=nbytes)
    assert caught.value.code == "invalid-size"


def sparse(path: Path, nbytes: int) -> str:
    with open(path, "wb") as file:
        file.write(head_of(nbytes))
        file.truncate(nbytes)
    return str(path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system that takes files of exabytes")
def test_readers_survive_sparse_files_that_claim_any_size(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"ingot-sparse-{os.getpid()}.safetensors"
    try:
        for nbytes in [10**14, 2**61, 2**63 - 4096]:
            calls = ["hash sha256", "hash blake3"]
            if nbytes < MOST_NBYTES:
                calls += ["open", "hash autov3", "verify", "warm", "rows", "last"]
            for _, call, outcome in outcomes(tmp_path, [("path", sparse(path, nbytes), calls)]):
                expected = "done" if call in ("open", "rows", "last") else "StorageError read"
                assert outcome == expected, (nbytes, call, outcome)
    finally:
        path.unlink(missing_ok=True)


def test_readers_survive_indices_and_headers_that_claim_any_size(tmp_path: Path) -> None:
    ingot.numpy.save_file({"t": np.arange(10)}, tmp_path / "a.safetensors")
    rows: list[tuple[str, object, list[str]]] = []
    for number, total in enumerate([*SIZES, *(size for size in NO_SIZES if not isinstance(size, bytes))]):
        index = tmp_path / f"m{number}.safetensors.index.json"
        index.write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": {"t": "a.safetensors"}})
        )
        rows.append(("path", str(index), ["load"]))
    count = len(rows)
    for number, entry in enumerate(
        {"dtype": "U8", "shape": shape, "data_offsets": [0, end]}
        for shape in ([2**62, 2**62], [2**63], [2**64 - 1], [1] * 10_000, [10**18])
        for end in (8, 2**63, 2**64 - 1)
    ):
        header = json.dumps({"t": entry}).encode()
        path = tmp_path / f"header{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        rows.append(("path", str(path), ["load"]))
    for number, length in enumerate([2**30, 2**40, 2**63, 2**64 - 1]):
        path = tmp_path / f"length{number}.safetensors"
        path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(100))
        rows.append(("path", str(path), ["load"]))
    found = outcomes(tmp_path, rows)
    assert all(not outcome.startswith("OverflowError") for *_, outcome in found)
    assert all(outcome.startswith("HeaderError") for *_, outcome in found[count:]), found[count:]
